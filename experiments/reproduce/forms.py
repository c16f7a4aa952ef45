"""Results of benchmarks, in the forms in which their clients write them.

`read_results(path)` sees the form from the file's content, not its name. That is JSON, one object
or several, in lines or not, or a CSV with a header. A form of a request a row is a line in
requests.csv. One of a run an object is a function in RUNS.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from evenflow.errors import UsageError
from evenflow.experiments.reproduce import trtllm_bench
from evenflow.experiments.reproduce.aiconfigurator import of_aiconfigurator
from evenflow.experiments.reproduce.measured import COLUMNS, MeasuredRun, closed_loop, of_means
from evenflow.experiments.reproduce.measured import of_requests as run_of
from evenflow.files import local_file
from evenflow.keys import shown
from evenflow.results.run import Floats
from evenflow.sums import plain_sum
from evenflow.traces.formats import number
from evenflow.traces.lines import value_of

Json = Mapping[str, Any]

KNOWN = (
    "read are those of vLLM's and SGLang's bench serve, GuideLLM, AIPerf, genai-perf, LLMPerf, "
    "trtllm-bench, TensorRT-LLM's performance overview, LLMServingSim, AIConfigurator"
)

MOST_BYTES = 2**30
"""No benchmark writes a larger file's."""

MOST_OF_ANYTHING = 1e30
"""No time, not in nanoseconds, and no length is more; squares of it are numbers."""

MOST_CLIENTS = 10**6
"""More are none: a very large number stands for no limit."""

ARRIVALS_OFF = 0.02
"""Rebuilt arrivals that miss the measured duration by more than this share are doubted aloud."""

MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3, "seconds": 1e3}


def read_results(path: Path) -> list[MeasuredRun]:
    """Return the runs that a file of results holds.

    Raises UsageError, which names the file and what would be right.
    """
    try:
        runs = list(_runs(path, local_file(path)))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deep") from None
    except UnicodeDecodeError:
        raise UsageError(f"{path}: not UTF-8 text; {KNOWN}") from None
    except KeyError as error:
        raise UsageError(f"{path}: without {error.args[0]}; {KNOWN}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}") from None
    if not runs:
        raise UsageError(f"{path}: holds no completed request; results of a whole run are right")
    return runs


def _runs(path: Path, file: Path) -> Iterator[MeasuredRun]:
    if file.stat().st_size > MOST_BYTES:
        raise ValueError(f"has more than {MOST_BYTES} bytes; {KNOWN}")
    text = file.read_text(encoding="utf-8-sig")
    if text.lstrip()[:1] not in ("{", "["):
        return _of_csv(path, text)
    objects = [
        item for value in _values(text) for item in (value if isinstance(value, list) else [value])
    ]
    if wrong := [item for item in objects if not isinstance(item, Mapping)]:
        raise ValueError(f"not the results of a benchmark, but {shown(wrong[0])}; {KNOWN}")
    return _of_objects(path.stem, objects) if objects else iter(())


def _values(text: str) -> Iterator[Any]:
    """Yield the JSON values of a text, one after the other. ValueError names the line."""
    decoder, place = json.JSONDecoder(), 0
    while (place := len(text) - len(text[place:].lstrip())) < len(text):
        try:
            value, place = decoder.raw_decode(text, place)
        except ValueError:
            line = text.count("\n", 0, place) + 1
            raise ValueError(f"the JSON that begins in line {line} is not valid, or cut") from None
        yield value


def _of_objects(stem: str, objects: Sequence[Json]) -> Iterator[MeasuredRun]:
    """Return the runs of JSON objects, which are all of the form of the first."""
    first = objects[0]
    table = next((form for form in requests_forms().values() if form.tells(first)), None)
    if table is not None:
        return iter([run_of(stem, table.read(objects))])
    there = [keys for keys in RUNS if all(value_of(first, k) not in (None, []) for k in keys)]
    read = RUNS[there[0]] if there else None
    if read is None:
        advice = next((words for keys, words in UNREAD.items() if keys <= first.keys()), KNOWN)
        keys = ", ".join(sorted(map(str, first))[:5]) or "nothing"
        raise ValueError(f"not the results of a benchmark that is known (has {keys}); {advice}")
    labels = [stem] if len(objects) == 1 else [f"{stem} {n}" for n in range(1, len(objects) + 1)]
    return (run for label, each in zip(labels, objects, strict=True) for run in read(label, each))


def _number(data: Json, path: str, factor: float = 1.0) -> float:
    """Return the number at a path. ValueError unless it is one, 0 or above."""
    if not 0 <= (found := number(value_of(data, path))) < MOST_OF_ANYTHING:
        raise ValueError(f"{path} is {shown(value_of(data, path))}; a number, 0 or above, is right")
    return factor * found


def _clients(data: Json, path: str) -> float | None:
    """Return the number of clients; None where unknown."""
    found = number(value_of(data, path))
    return found if 1 <= found <= MOST_CLIENTS else None


def _numbers(values: Any) -> Floats:
    """Return a list as numbers, NaN for values that are none."""
    found = np.array([number(value) for value in values], dtype=float)
    return np.where(np.abs(found) < MOST_OF_ANYTHING, found, np.nan)


class Requests(NamedTuple):
    """Columns of a client's result for each value of a request, and their units (requests.csv).

    The units are those of the arrival in seconds, of TTFT and E2EL in milliseconds. `clock`: the
    last two are times, as the arrival is. Rows with "warmup" at `phase` are none of the run.
    """

    arrival_s: str
    input_tokens: str
    output_tokens: str
    ttft_ms: str
    e2el_ms: str
    arrival_unit: str
    ttft_unit: str
    e2el_unit: str
    clock: str
    phase: str

    def tells(self, row: Json) -> bool:
        """Say whether a row has the first key of each path."""
        return all(path.partition(".")[0] in row for path in self[:5])

    def read(self, rows: Sequence[Json]) -> pd.DataFrame:
        """Return the rows under our names, NaN where a number is missing."""
        rows = [row for row in rows if not self.phase or value_of(row, self.phase) != "warmup"]
        columns = zip(COLUMNS, self[:5], strict=True)
        table = pd.DataFrame(
            {c: _numbers(value_of(row, path) for row in rows) for c, path in columns}
        )
        table[["arrival_s", "ttft_ms", "e2el_ms"]] *= [float(unit) for unit in self[5:8]]
        if self.clock:
            table[["ttft_ms", "e2el_ms"]] -= 1e3 * table[["arrival_s"]].to_numpy()
        return table


@cache
def requests_forms() -> Mapping[str, Requests]:
    """Return how clients write a row for each request, by their names."""
    text = Path(__file__).with_name("requests.csv").read_text(encoding="utf-8")
    return {row.pop("client"): Requests(**row) for row in csv.DictReader(text.splitlines())}


def _of_csv(path: Path, text: str) -> Iterator[MeasuredRun]:
    try:
        table = pd.read_csv(io.StringIO(text))
    except ValueError:  # what pandas says is about its own insides
        table = pd.DataFrame()
    if "silicon_tpot_ms" in table:
        return iter(_of_rows(table, of_aiconfigurator, "AIConfigurator"))
    if {*trtllm_bench.COLUMNS, trtllm_bench.MEASURED} <= {*table}:
        name = "TensorRT-LLM's performance overview"
        return iter(_of_rows(table, trtllm_bench.of_perf_overview, name))
    if {*trtllm_bench.STATIC_COLUMNS, trtllm_bench.STATIC_MEASURED} <= {*table}:
        return iter(_of_rows(table, trtllm_bench.of_static_batches, "static batches"))
    rows: list[Json] = [
        dict(zip(map(str, table), row, strict=True)) for row in table.to_numpy().tolist()
    ]
    forms = requests_forms().values()
    form = next((form for form in forms if rows and form.tells(rows[0])), None)
    if form is None:
        advice = next((told for words, told in PRINTED.items() if words in text), KNOWN)
        needed = f"no columns {', '.join(COLUMNS)}"
        raise ValueError(f"not the results of a benchmark that is known ({needed}); {advice}")
    return iter([run_of(path.stem, form.read(rows), *_beside(path))])


def _of_rows(
    table: pd.DataFrame, read: Callable[[pd.DataFrame], Iterator[MeasuredRun]], name: str
) -> list[MeasuredRun]:
    try:
        return list(read(table))
    except (ValueError, TypeError, AttributeError):  # what pandas says is about its own insides
        raise ValueError(f"rows of {name}, with text where a number is right") from None


def _beside(path: Path) -> tuple[float, Floats] | tuple[()]:
    """Return the duration and all gaps between tokens, in ms, from `itls.json.gz` beside a CSV."""
    beside = path.with_name("itls.json.gz")
    if not beside.is_file():
        return ()
    with gzip.open(beside, "rt", encoding="utf-8") as file:
        run = json.load(file).get(path.stem)
    if run is None:
        return ()
    return float(run["duration_s"]), np.array([gap for gaps in run["itls_ms"] for gap in gaps])


def _of_guidellm(label: str, data: Json) -> Iterator[MeasuredRun]:
    """Read a report of GuideLLM; its `requests` are the successful ones."""
    for index, benchmark in enumerate(_list(data, "benchmarks")):
        rows = _list(benchmark, "requests.successful")
        others = (value_of(benchmark, f"requests.{kind}") for kind in ("errored", "incomplete"))
        lost = sum(len(other) for other in others if isinstance(other, list))
        doubts = [f"{lost} requests failed or were cut off, and are left out"] if lost else []
        newer, older = (requests_forms()[name] for name in ("GuideLLM", "GuideLLM, older"))
        form = newer if any(value_of(row, newer.arrival_s) for row in rows) else older
        if rows:
            yield run_of(f"{label} {index + 1}", form.read(rows), doubts=doubts)


def _list(data: Json, path: str) -> list[Any]:
    """Return the list at a path of keys. ValueError unless it is one."""
    if not isinstance(found := value_of(data, path), list):
        raise ValueError(f"{path} is {shown(found)}; a list is right")
    return found


def _of_vllm(label: str, data: Json) -> Iterator[MeasuredRun]:
    """Read what vLLM's `bench serve` or SGLang's `bench_serving` wrote, with all requests.

    A request that failed has no TTFT. Lists are in seconds.
    """
    ttfts_s, itls = _numbers(_list(data, "ttfts")), _list(data, "itls")
    inputs = _numbers(_list(data, "input_lens"))
    gaps_s = [_numbers(gaps if isinstance(gaps, list) else [None]) for gaps in itls]
    told = _list(data, "output_lens") if value_of(data, "output_lens") else None
    gaps_s = [np.where(gaps >= 0, gaps, np.nan) for gaps in gaps_s]
    outputs = _numbers(told or [1 + len(gaps) for gaps in gaps_s])
    counts = [len(values) for values in (ttfts_s, itls, inputs, outputs)]
    if len(set(counts)) > 1:
        words = "ttfts, itls, input_lens and output_lens have {}, {}, {} and {} entries"
        raise ValueError(f"{words.format(*counts)}; one for each request is right")
    e2els_s = ttfts_s + [plain_sum(gaps.tolist()) for gaps in gaps_s]
    arrivals_s, doubts = _arrivals(data, e2els_s)
    columns = (arrivals_s, inputs, outputs, 1e3 * ttfts_s, 1e3 * e2els_s)
    table = pd.DataFrame(dict(zip(COLUMNS, columns, strict=True)))
    gaps_ms = 1e3 * np.concatenate([gaps[np.isfinite(gaps)] for gaps in gaps_s] or [np.empty(0)])
    clients = _clients(data, "max_concurrency")
    run = {} if clients is None else {"workload.arrivals": closed_loop(round(clients))}
    duration_s = number(value_of(data, "duration"))
    yield run_of(label, table, duration_s, gaps_ms, run=run, doubts=doubts)


def _arrivals(data: Json, e2els_s: Floats) -> tuple[Floats, list[str]]:
    """Return when each request was sent: as written, or drawn again as the client drew it.

    Older clients draw a gamma gap after a request from `numpy.random.seed(0)`. Newer ones have a
    gap before the first, and stretch all: the last of n is at n / rate. Of the two, those are taken
    that end when the run did.
    """
    if value_of(data, "start_times"):
        return _numbers(_list(data, "start_times")), []
    rate, count = number(value_of(data, "request_rate")), len(e2els_s)
    if not rate > 0:
        return np.zeros(count), [
            "request_rate is not known: all requests are taken to come at once"
        ]
    if math.isinf(rate):
        return np.zeros(count), []
    burstiness = number(value_of(data, "burstiness") or 1.0)
    duration_s, lasted_s = _number(data, "duration"), np.nan_to_num(e2els_s)
    if duration_s <= 0 or not burstiness > 0:
        raise ValueError("duration and burstiness should be above 0, or start_times be there")
    drawn = np.random.RandomState(0).gamma(burstiness, 1 / (rate * burstiness), count)
    after = np.concatenate([[0.0], np.cumsum(drawn)[:-1]])
    stretched = np.cumsum(drawn) * (count / rate / drawn.sum())

    def off(arrivals_s: Floats) -> float:
        return abs(float((arrivals_s - arrivals_s[0] + lasted_s).max()) / duration_s - 1)

    best = min((after, stretched), key=off)
    doubt = f"arrivals, drawn again with seed 0, end {off(best):.0%} off the measured duration"
    return best - best[0], [] if off(best) <= ARRIVALS_OFF else [doubt]


def _of_vllm_means(label: str, data: Json) -> Iterator[MeasuredRun]:
    """Read what the same clients wrote without requests."""
    metrics = {key: _number(data, key) for key in ("mean_ttft_ms", "mean_tpot_ms")}
    metrics |= {
        key: number(value)
        for key, value in data.items()
        if (key.endswith("_ms") or key == "duration") and 0 <= number(value) < MOST_OF_ANYTHING
    }
    totals = (
        number(value_of(data, "total_input_tokens")),
        number(value_of(data, "total_output_tokens")),
    )
    done = number(value_of(data, "completed"))
    lengths = [total / done for total in totals] if done > 0 and np.isfinite(totals).all() else []
    clients = _clients(data, "max_concurrency")
    option = "--output-details" if value_of(data, "backend") == "sglang" else "--save-detailed"
    doubt = f"the file has no requests one by one; give {option}"
    yield of_means(label, metrics, doubt, lengths=lengths, clients=clients)


AIPERF_METRICS = {
    "ttft": "time_to_first_token",
    "tpot": "inter_token_latency",
    "e2el": "request_latency",
}
"""AIPerf's names; what it calls inter-token latency is a mean over each request, vLLM's TPOT."""


def _of_aiperf(label: str, data: Json) -> Iterator[MeasuredRun]:
    """Read the totals of AIPerf or genai-perf, which say the unit of each."""
    metrics = {}
    for ours, theirs in AIPERF_METRICS.items():
        if ours == "e2el" and value_of(data, theirs) is None:
            continue
        unit = str(value_of(data, f"{theirs}.unit"))
        if unit not in MILLISECONDS:
            raise ValueError(f"{theirs}.unit is {shown(unit)}; ns, us, ms or s is right")
        metrics[f"mean_{ours}_ms"] = _number(data, f"{theirs}.avg", MILLISECONDS[unit])
        if value_of(data, f"{theirs}.p99") is not None:
            metrics[f"p99_{ours}_ms"] = _number(data, f"{theirs}.p99", MILLISECONDS[unit])
    lengths = [
        number(value_of(data, f"{kind}_sequence_length.avg")) for kind in ("input", "output")
    ]
    config = value_of(data, "input_config")
    clients, rate = (_found(config, name) for name in ("concurrency", "request_rate"))
    yield of_means(
        label,
        metrics,
        "totals only; requests one by one are in profile_export.jsonl beside it (AIPerf)",
        lengths=lengths if np.isfinite(lengths).all() else [],
        clients=clients if rate is None else None,
    )


def _found(data: Any, name: str) -> float | None:
    """Return the number under a key, however deep; None where there is none. Warm-up is passed."""
    if isinstance(data, Mapping) and data.get("name") != "warmup":
        if math.isfinite(value := number(data.get(name))):
            return value
        data = list(data.values())
    inner = data if isinstance(data, list) else []
    return next((found for each in inner if (found := _found(each, name)) is not None), None)


def _of_llmperf(label: str, data: Json) -> Iterator[MeasuredRun]:
    """Read the summary of LLMPerf, in seconds.

    What it calls inter-token latency holds the first token, so TPOT is from E2EL and TTFT.
    """
    ttft, e2el, *lengths = (
        _number(data, f"results_{name}_mean")
        for name in (
            "ttft_s",
            "end_to_end_latency_s",
            "number_input_tokens",
            "number_output_tokens",
        )
    )
    metrics = {"mean_ttft_ms": 1e3 * ttft, "mean_e2el_ms": 1e3 * e2el}
    if e2el < ttft:
        raise ValueError("results_end_to_end_latency_s_mean is less than results_ttft_s_mean")
    metrics["mean_tpot_ms"] = 1e3 * (e2el - ttft) / max(lengths[1] - 1, 1)
    told = _number(data, "num_concurrent_requests")
    doubt = "means only, TPOT from those of E2EL and TTFT"
    yield of_means(label, metrics, doubt, lengths=lengths, clients=told)


def _of_trtllm(label: str, data: Json) -> Iterator[MeasuredRun]:
    """Read a report of trtllm-bench, which has latencies of tokens if it streamed."""
    if value_of(data, "streaming_metrics") is None:
        raise ValueError("has no streaming_metrics; trtllm-bench with --streaming writes them")
    metrics = {
        f"mean_{name}_ms": _number(data, f"streaming_metrics.avg_{name}_ms")
        for name in ("ttft", "tpot")
    }
    kinds = ("avg_input_length", "avg_output_length")
    lengths = [_number(data, f"request_info.{kind}") for kind in kinds]
    clients = _clients(data, "request_info.avg_num_concurrent_requests")
    doubt = "means only; the clients are taken to be as many as requests were served at once"
    yield of_means(label, metrics, doubt, lengths=lengths, clients=clients)


RUNS: Mapping[tuple[str, ...], Callable[[str, Json], Iterator[MeasuredRun]]] = {
    ("benchmarks",): _of_guidellm,
    ("ttfts",): _of_vllm,
    ("mean_ttft_ms",): _of_vllm_means,
    ("time_to_first_token",): _of_aiperf,
    ("results_ttft_s_mean",): _of_llmperf,
    ("request_info", "performance"): _of_trtllm,
}
"""What reads an object that has something under all of these keys."""

UNREAD: Mapping[frozenset[str], str] = {
    frozenset({"avg_latency", "latencies"}): "vLLM's bench latency has no TTFT; bench serve has",
    frozenset({"elapsed_time", "tokens_per_second"}): (
        "vLLM's bench throughput has no TTFT; bench serve has"
    ),
    frozenset({"ttft_s", "end_to_end_latency_s"}): (
        "LLMPerf's responses one by one have no arrival times; its _summary.json is read"
    ),
    frozenset({"experiments"}): "genai-perf's profile_export_genai_perf.json is read",
}
PRINTED = {
    "Serving Benchmark Result": (
        "this is what bench serve prints; its --save-result --save-detailed (SGLang: --output-file "
        "--output-details) writes what is read"
    ),
    "PERFORMANCE OVERVIEW": "this is what trtllm-bench prints; its --report_json is read",
    "Metric,avg": "of AIPerf and genai-perf the .json beside this is read, or profile_export.jsonl",
}
"""What is not read, and what of the same client is."""
