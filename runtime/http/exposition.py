"""What a server counts, in Prometheus' text format, under the names, types and labels of vLLM V1.

Names and bounds as `vllm/v1/metrics` of vLLM 0.32.0 has them, so that its dashboards fill; what an
engine here has not (prefix caches of several tiers, adapters) is left out.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

FIRST_S: Final = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
GAP_S: Final = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
WHOLE_S: Final = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
TOKENS: Final = tuple(n * 10**power for power in range(6) for n in (1, 2, 5))

HISTOGRAMS: Final[Mapping[str, tuple[str, Sequence[float]]]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", FIRST_S),
    "vllm:inter_token_latency_seconds": ("Between two tokens of a request.", GAP_S),
    "vllm:request_time_per_output_token_seconds": ("Per token after the first.", GAP_S),
    "vllm:e2e_request_latency_seconds": ("From arrival to the last token.", WHOLE_S),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", WHOLE_S),
    "vllm:request_prompt_tokens": ("Tokens of the prompts of finished requests.", TOKENS),
    "vllm:request_generation_tokens": ("Tokens that finished requests got.", TOKENS),
}
HELP: Final = {
    "vllm:num_requests_running": "Requests that were admitted and have not finished.",
    "vllm:num_requests_waiting": "Requests of which nothing is scheduled.",
    "vllm:kv_cache_usage_perc": "Share of the KV pages in use; 1 is all.",
    "vllm:num_preemptions_total": "Requests preempted so far.",
    "vllm:prompt_tokens_total": "Prompt tokens of the requests admitted so far.",
    "vllm:generation_tokens_total": "Tokens generated so far.",
    "vllm:request_success_total": "Requests that ended, by how.",
    "evenflow:kv_pages_free": "KV pages that nothing holds.",
    "evenflow:kv_pages_total": "KV pages in all.",
}


class Histogram:
    """Counts values by upper bounds; one above all of them is counted too."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def lines(self, name: str, labels: str) -> Iterator[str]:
        """Yield the cumulative counts, the sum and the count."""
        total = 0
        for bound, count in zip([*self._bounds, math.inf], list(self._counts), strict=True):
            total += count
            le = "+Inf" if math.isinf(bound) else float(bound)
            yield f'{name}_bucket{{{labels},le="{le}"}} {total}'
        yield f"{name}_sum{{{labels}}} {self._sum}"
        yield f"{name}_count{{{labels}}} {total}"


class Counted:
    """All that a server counts; one thread counts, any may read.

    Tokens of the prompts that were admitted, tokens generated, and how many requests `finished`, by
    their reason.
    """

    def __init__(self) -> None:
        self.prompt_tokens = self.output_tokens = 0
        self.finished = {"stop": 0, "length": 0, "abort": 0}
        self._of = {name: Histogram(bounds) for name, (_, bounds) in HISTOGRAMS.items()}

    def token(self, since_arrival_s: float, since_last_s: float | None) -> None:
        """Count a token, so long after the arrival and after the one before (None: no other)."""
        self.output_tokens += 1
        if since_last_s is None:
            self._of["vllm:time_to_first_token_seconds"].observe(since_arrival_s)
        else:
            self._of["vllm:inter_token_latency_seconds"].observe(since_last_s)

    def end(
        self, reason: str, first_s: float, whole_s: float, prompt_tokens: int, tokens: int
    ) -> None:
        """Count a request at its end: seconds to its first and its last token, and its tokens."""
        self.finished[reason] += 1
        if tokens > 1:
            each_s = (whole_s - first_s) / (tokens - 1)
            self._of["vllm:request_time_per_output_token_seconds"].observe(each_s)
        self._of["vllm:e2e_request_latency_seconds"].observe(whole_s)
        self._of["vllm:request_decode_time_seconds"].observe(whole_s - first_s)
        self._of["vllm:request_prompt_tokens"].observe(prompt_tokens)
        self._of["vllm:request_generation_tokens"].observe(tokens)

    def exposition(self, model: str, gauges: Mapping[str, float]) -> str:
        """Return all that is counted, and the driver's `gauges`, as Prometheus reads it."""
        labels = f'model_name={json.dumps(model)},engine="0"'
        lines: list[str] = []
        for name, value in {
            **gauges,
            "vllm:prompt_tokens_total": self.prompt_tokens,
            "vllm:generation_tokens_total": self.output_tokens,
        }.items():
            lines += [*_head(name, HELP[name]), f"{name}{{{labels}}} {value}"]
        name = "vllm:request_success_total"
        lines += _head(name, HELP[name])
        for reason, count in self.finished.items():
            lines.append(f'{name}{{{labels},finished_reason="{reason}"}} {count}')
        for name, histogram in self._of.items():
            lines += [
                *_head(name, HISTOGRAMS[name][0], "histogram"),
                *histogram.lines(name, labels),
            ]
        return "\n".join(lines) + "\n"


def _head(name: str, words: str, kind: str = "") -> list[str]:
    kind = kind or ("counter" if name.endswith("_total") and ":kv_" not in name else "gauge")
    return [f"# HELP {name} {words}", f"# TYPE {name} {kind}"]
