"""Prometheus metrics of a server, under the names, types and labels of vLLM V1.

Names and bounds as `vllm/v1/metrics` of vLLM 0.32.0 has them, so that its dashboards fill. What an
engine here has not (prefix caches of several tiers, adapters) is left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

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

METRICS: Final[tuple[tuple[Any, str, str, tuple[float, ...]], ...]] = (
    (Gauge, "vllm:num_requests_running", "Requests that were admitted and have not finished.", ()),
    (Gauge, "vllm:num_requests_waiting", "Requests of which nothing is scheduled.", ()),
    (Gauge, "vllm:kv_cache_usage_perc", "Share of the KV pages in use; 1 is all.", ()),
    (Counter, "vllm:num_preemptions_total", "Requests preempted so far.", ()),
    (Gauge, "evenflow:kv_pages_free", "KV pages that nothing holds.", ()),
    (Gauge, "evenflow:kv_pages_total", "KV pages in all.", ()),
    (Counter, "vllm:prompt_tokens_total", "Prompt tokens of requests that have a token.", ()),
    (Counter, "vllm:generation_tokens_total", "Tokens generated so far.", ()),
    (Histogram, "vllm:time_to_first_token_seconds", "From arrival to the first token.", FIRST_S),
    (Histogram, "vllm:inter_token_latency_seconds", "Between two tokens of a request.", GAP_S),
    (Histogram, "vllm:request_time_per_output_token_seconds", "Per token after the first.", GAP_S),
    (Histogram, "vllm:e2e_request_latency_seconds", "From arrival to the last token.", WHOLE_S),
    (Histogram, "vllm:request_decode_time_seconds", "From the first token to the last.", WHOLE_S),
    (Histogram, "vllm:request_prompt_tokens", "Tokens of prompts of finished requests.", TOKENS),
    (Histogram, "vllm:request_generation_tokens", "Tokens that finished requests got.", TOKENS),
)
PREEMPTIONS: Final = "vllm:num_preemptions_total"


class Timed:
    """The tokens of one request, and when they came; it arrives now."""

    def __init__(self, prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self.tokens = 0
        self.arrival_s = self.first_s = self.last_s = time.monotonic()


class Counted:
    """Metrics of a server of `model`, as vLLM names them; `finished`: requests by reason."""

    def __init__(self, model: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry()
        labels = {"model_name": model, "engine": "0"}
        self._of: dict[str, Any] = {}
        for kind, name, words, bounds in METRICS:
            more: dict[str, Any] = {"buckets": bounds} if bounds else {}
            metric = kind(name, words, tuple(labels), registry=self.registry, **more)
            self._of[name] = metric.labels(**labels)
        names = (*labels, "finished_reason")
        ended = Counter(
            "vllm:request_success", "Requests that ended.", names, registry=self.registry
        )
        reasons = ("stop", "length", "abort")
        self.finished = {each: ended.labels(**labels, finished_reason=each) for each in reasons}
        self._preemptions = 0.0

    def token(self, request: Timed, reason: str | None) -> None:
        """Count a token that comes now; `reason` comes with the last one."""
        now_s = time.monotonic()
        self._of["vllm:generation_tokens_total"].inc()
        if not request.tokens:
            request.first_s = now_s
            self._of["vllm:prompt_tokens_total"].inc(request.prompt_tokens)
            self._of["vllm:time_to_first_token_seconds"].observe(now_s - request.arrival_s)
        else:
            self._of["vllm:inter_token_latency_seconds"].observe(now_s - request.last_s)
        request.last_s = now_s
        request.tokens += 1
        if reason is not None:
            self._end(request, reason)

    def _end(self, request: Timed, reason: str) -> None:
        decoding_s = request.last_s - request.first_s
        self.finished[reason].inc()
        if request.tokens > 1:
            each_s = decoding_s / (request.tokens - 1)
            self._of["vllm:request_time_per_output_token_seconds"].observe(each_s)
        self._of["vllm:e2e_request_latency_seconds"].observe(request.last_s - request.arrival_s)
        self._of["vllm:request_decode_time_seconds"].observe(decoding_s)
        self._of["vllm:request_prompt_tokens"].observe(request.prompt_tokens)
        self._of["vllm:request_generation_tokens"].observe(request.tokens)

    def gauges(self, values: Mapping[str, float]) -> None:
        """Set the gauges, and the counter of preemptions, to the driver's values."""
        grown = values[PREEMPTIONS] - self._preemptions
        self._preemptions += grown
        self._of[PREEMPTIONS].inc(grown)
        for name in values.keys() - {PREEMPTIONS}:
            self._of[name].set(values[name])
