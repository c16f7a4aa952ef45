"""Read what others measured: results of benchmarks, in the forms in which their clients write them.

`read_results(path)` sees the form from the file: JSON of vLLM's `benchmark_serving` and `bench
serve`, JSON of GuideLLM, `requests.jsonl` of LLMServingSim, the CSV of AIConfigurator, and CSVs of
one request a line. Every one becomes the same: requests with their latencies, or a closed loop with
means. Knows no simulation.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from evenflow.costs.silicon.cost import GPUS as SILICON
from evenflow.errors import UsageError
from evenflow.files import require_file
from evenflow.report.tables import is_number
from evenflow.results.metrics import statistics
from evenflow.results.run import Floats
from evenflow.sums import plain_sum

LATENCIES = ("ttft", "tpot", "e2el")
COLUMNS = ["arrival_s", "input_tokens", "output_tokens", "ttft_ms", "e2el_ms"]
"""What every form says of a request."""
ARRIVALS_OFF = 0.02
"""Rebuilt arrivals that miss the measured duration by more than this share are doubted aloud."""

GPUS = {"a100_pcie": "A100-80G-PCIe"} | {each.system: each.on for each in SILICON.values()}
"""AIConfigurator's names of systems, and the GPUs that they are here; others keep their name."""

SETUP = (
    *("backend", "backend_version", "model_path", "system", "precision", "mode", "concurrency"),
    *("isl", "osl", "tp_size", "pp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size"),
)
"""What AIConfigurator's rows say of a set-up."""

ENGINES = {"trtllm": "TensorRT-LLM", "vllm": "vLLM", "sglang": "SGLang"}


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """One run that was measured.

    `metrics` are under the keys of vLLM's `bench serve` (ms, and a second). `requests` has a row a
    request: arrival_s, input_tokens, output_tokens and, where they are known, ttft_ms, tpot_ms,
    e2el_ms; `gaps_ms` are all gaps between tokens, in any order. `run` are keys of RUN.yaml that
    the file itself says, `facts` what a catalogue may choose by, `doubts` what makes a comparison
    unfair.
    """

    label: str
    metrics: Mapping[str, float]
    requests: pd.DataFrame
    gaps_ms: Floats | None = None
    run: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    doubts: Sequence[str] = ()


def read_results(path: Path) -> list[Measured]:
    """Return the runs that a file of results holds.

    Raises UsageError, which names the file and what would be right.
    """
    readers: Mapping[str, Callable[[Path], Iterator[Measured]]] = {
        ".json": _of_json,
        ".jsonl": _of_llmservingsim,
        ".csv": _of_csv,
    }
    if path.suffix not in readers:
        raise UsageError(f"{path}: should be a .json, .jsonl or .csv of a benchmark's results")
    require_file(path)
    try:
        runs = list(readers[path.suffix](path))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error})") from None
    except RecursionError:
        raise UsageError(f"{path}: nested too deep") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        told = f"without {error}" if isinstance(error, KeyError) else str(error)
        raise UsageError(
            f"{path}: not the results of a benchmark that is known ({told}); vLLM's bench serve "
            "with --save-detailed, GuideLLM, LLMServingSim and AIConfigurator are"
        ) from None
    if not runs:
        raise UsageError(f"{path}: holds no completed request; results of a whole run are right")
    return runs


def of_requests(
    label: str,
    requests: pd.DataFrame,
    duration_s: float | None = None,
    gaps_ms: Floats | None = None,
    **more: Any,
) -> Measured:
    """Return a run of requests with their latencies; its metrics are those of `bench serve`.

    `duration_s` is from the first arrival to the last token where it is not known. `more` goes to
    `Measured`.
    """
    latencies = {name: requests[f"{name}_ms"].to_numpy(float) for name in LATENCIES}
    known = np.isfinite([latencies["ttft"], latencies["e2el"]])
    if not known.size or not known.all():
        raise ValueError("each request needs a TTFT and an E2EL, which are numbers")
    requests = requests.assign(arrival_s=requests["arrival_s"] - requests["arrival_s"].min())
    if duration_s is None:
        duration_s = float((requests["arrival_s"] + requests["e2el_ms"] / 1e3).max())
    metrics: dict[str, float] = {"duration": duration_s, "completed": len(requests)}
    tokens = int(requests["output_tokens"].sum())
    metrics["request_throughput"] = len(requests) / duration_s
    metrics["output_throughput"] = tokens / duration_s
    several = requests["output_tokens"].to_numpy() > 1
    latencies["tpot"] = latencies["tpot"][several]
    if gaps_ms is not None:
        latencies["itl"] = gaps_ms
    for name, values_ms in latencies.items():
        if len(values_ms):
            found = statistics(name, values_ms / 1e3)
            metrics |= {key: value for key, value in found.items() if value is not None}
    return Measured(label, metrics, requests, gaps_ms, **more)


def _columns(requests: Any) -> pd.DataFrame:
    """Return arrivals, lengths, TTFTs and E2ELs, in order of arrival, with their TPOT."""
    table = pd.DataFrame(requests)[COLUMNS].astype({"input_tokens": int, "output_tokens": int})
    gaps = np.maximum(table["output_tokens"] - 1, 1)
    several = table["output_tokens"] > 1
    table["tpot_ms"] = ((table["e2el_ms"] - table["ttft_ms"]) / gaps).where(several)
    return table.sort_values("arrival_s", kind="stable", ignore_index=True)


# -- JSON: vLLM and GuideLLM ----------------------------------------------------------------------


def _of_json(path: Path) -> Iterator[Measured]:
    data = json.loads(path.read_text(encoding="utf-8"))
    if "benchmarks" in data:
        for index, benchmark in enumerate(data["benchmarks"]):
            if benchmark["requests"]["successful"]:
                yield _of_guidellm(f"{path.stem} {index + 1}", benchmark)
    else:
        yield _of_vllm(path.stem, data)


def _of_vllm(label: str, data: Mapping[str, Any]) -> Measured:
    """Read what `benchmark_serving --save-result` or `bench serve --save-detailed` wrote.

    A request that failed has no TTFT and is left out. Lists are in seconds.
    """
    if "ttfts" not in data:
        metrics = {key: float(data[key]) for key in ("mean_ttft_ms", "mean_tpot_ms", "duration")}
        more = {key: v for key, v in data.items() if key.endswith("_ms") and is_number(v)}
        doubt = "the file has no requests one by one; give --save-detailed"
        return Measured(label, metrics | more, pd.DataFrame(), doubts=(doubt,))
    itls_s = data["itls"]
    e2els_s = [first + plain_sum(gaps) for first, gaps in zip(data["ttfts"], itls_s, strict=True)]
    arrivals_s, doubts = _arrivals(data, e2els_s)
    outputs = data.get("output_lens") or [1 + len(gaps) for gaps in itls_s]
    columns = arrivals_s, data["input_lens"], outputs, data["ttfts"], e2els_s
    every = pd.DataFrame(dict(zip(COLUMNS, columns, strict=True)))
    every[["ttft_ms", "e2el_ms"]] *= 1e3
    done = every[(every["ttft_ms"] > 0) & (every["output_tokens"] > 0)]
    gaps_ms = 1e3 * np.array([gap for gaps in itls_s for gap in gaps])
    failed = len(every) - len(done)
    doubts += [f"{failed} requests failed and are left out"] if failed else []
    closed = data.get("max_concurrency")
    run = {} if closed is None else {"workload.arrivals": _closed(int(closed))}
    duration_s = float(data["duration"])
    return of_requests(label, _columns(done), duration_s, gaps_ms, run=run, doubts=doubts)


def _arrivals(data: Mapping[str, Any], e2els_s: Sequence[float]) -> tuple[list[float], list[str]]:
    """Return when each request was sent: as written, or drawn again as the client drew it.

    Older clients draw a gamma gap after each request from `numpy.random.seed(0)`; newer ones have a
    gap before the first, and stretch all so that the last of n is at n / rate. Of the two, those
    are taken that end when the run did.
    """
    if data.get("start_times"):
        return list(np.subtract(data["start_times"], min(data["start_times"]))), []
    rate, count = float(data["request_rate"]), len(e2els_s)
    if math.isinf(rate):
        return [0.0] * count, []
    burstiness = float(data.get("burstiness") or 1.0)
    drawn = np.random.RandomState(0).gamma(burstiness, 1 / (rate * burstiness), count)
    after = np.concatenate([[0.0], np.cumsum(drawn)[:-1]])
    stretched = np.cumsum(drawn) * (count / rate / drawn.sum())
    duration_s = float(data["duration"])

    def off(arrivals_s: Floats) -> float:
        return abs(float((arrivals_s - arrivals_s[0] + e2els_s).max()) / duration_s - 1)

    best = min((after, stretched), key=off)
    doubt = f"arrivals, drawn again with seed 0, end {off(best):.0%} off the measured duration"
    return list(best - best[0]), [doubt] if off(best) > ARRIVALS_OFF else []


def _of_guidellm(label: str, benchmark: Mapping[str, Any]) -> Measured:
    """Read one benchmark of GuideLLM, whose `requests` hold those that went well."""
    requests = benchmark["requests"]
    rows = [
        {
            "arrival_s": float(_first(each, "request_start_time", "start_time")),
            "input_tokens": each["prompt_tokens"],
            "output_tokens": each["output_tokens"],
            "ttft_ms": float(each["time_to_first_token_ms"]),
            "e2el_ms": 1e3 * float(each["request_latency"]),
        }
        for each in requests["successful"]
    ]
    lost = sum(len(requests.get(kind) or ()) for kind in ("errored", "incomplete"))
    doubts = [f"{lost} requests failed or were cut off, and are left out"] if lost else []
    return of_requests(label, _columns(rows), doubts=doubts)


def _first(data: Mapping[str, Any], *names: str) -> Any:
    name = next((name for name in names if data.get(name) is not None), names[0])
    return data[name]


# -- lines: LLMServingSim, and one request a line -------------------------------------------------


def _of_llmservingsim(path: Path) -> Iterator[Measured]:
    """Read LLMServingSim's `requests.jsonl` of vLLM; its engine's clock is in seconds."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
    if rows:
        names = {"input_toks": "input_tokens", "output_toks": "output_tokens"}
        names |= {f"{name}_ts": f"{name}_s" for name in ("queued", "first_token", "last_token")}
        yield _of_engine(path, pd.DataFrame(rows).rename(columns=names))


def _of_engine(path: Path, table: pd.DataFrame) -> Measured:
    """Return a run as the engine's clock saw it: latencies from when a request was queued."""
    first, last = table["first_token_s"], table["last_token_s"]
    table = table.assign(
        arrival_s=table["queued_s"],
        ttft_ms=1e3 * (first - table["queued_s"]),
        e2el_ms=1e3 * (last - table["queued_s"]),
    )
    return of_requests(path.stem, _columns(table))


def _of_csv(path: Path) -> Iterator[Measured]:
    table = pd.read_csv(path)
    if "silicon_tpot_ms" in table:
        yield from _of_aiconfigurator(table)
    elif "first_token_s" in table:
        yield _of_engine(path, table)
    else:
        yield of_requests(path.stem, _columns(table), *_beside(path))


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


# -- AIConfigurator: a closed loop a row ----------------------------------------------------------


def _of_aiconfigurator(table: pd.DataFrame) -> Iterator[Measured]:
    """Read rows of AIConfigurator's silicon_sample.csv: means of a closed loop each.

    An empty precision is bf16. Rows that are measured twice count once. The file itself tells the
    number of clients among the words on a row's origin, else by the batch size of each group.
    `slower` are those with the same set-up as one that is more than 5 % faster.
    """
    precision = table["dtype"] if "dtype" in table else table["precision"]
    table = table.assign(precision=precision.fillna("bf16"))
    if "concurrency" not in table:
        told = table["silicon_data_source"].str.extract(r"silicon_concurrency=(\d+)")[0]
        by_group = table["batch_size"] * table["attention_dp_size"].fillna(1)
        table = table.assign(concurrency=told.astype(float).fillna(by_group))
    table = table.drop_duplicates(["silicon_ttft_ms", "silicon_tpot_ms"])
    alike = table.groupby([name for name in SETUP if name in table], dropna=False)
    fastest_ms = alike["silicon_tpot_ms"].transform("min")
    table = table.assign(slower=table["silicon_tpot_ms"] > 1.05 * fastest_ms)
    for row in table[table["tp_size"].notna()].to_dict("records"):
        model = str(row["model_path"]).rpartition("/")[2]
        model = model.removesuffix("-Instruct").removesuffix("-FP8")
        ranks, stages, clients = (int(row[k]) for k in ("tp_size", "pp_size", "concurrency"))
        known = row.get("attention_dp_size", 1)
        groups = 1 if pd.isna(known) else int(known)
        whole = row.get("moe_ep_size") == ranks * groups > 1
        lengths = int(row["isl"]), int(row["osl"])
        layout = layout_words(ranks, groups, stages)
        version = "" if pd.isna(row["backend_version"]) else f" {row['backend_version']}"
        yield Measured(
            f"{model}, {layout}, {lengths[0]}/{lengths[1]}, {clients} clients",
            {"mean_ttft_ms": row["silicon_ttft_ms"], "mean_tpot_ms": row["silicon_tpot_ms"]},
            pd.DataFrame([lengths], columns=["input_tokens", "output_tokens"]),
            run={
                "model": model,
                "gpu": GPUS.get(row["system"], row["system"]),
                "stages": stages,
                "tensor_parallel": ranks,
                **({"data_parallel": groups} if groups > 1 else {}),
                **({"expert_parallel": True} if whole else {}),
                "workload.arrivals": _closed(clients),
            },
            facts={
                "engine": f"{ENGINES.get(row['backend'], row['backend'])}{version}",
                "mode": "agg",
                **{str(name): value for name, value in row.items() if not pd.isna(value)},
            },
        )


def layout_words(ranks: int, groups: int, stages: int) -> str:
    """Return what people call so many GPUs: TP4 x DP2 x PP2, without what there is one of."""
    more = {"DP": groups, "PP": stages}
    return " x ".join([f"TP{ranks}", *(f"{name}{n}" for name, n in more.items() if n > 1)])


def _closed(clients: int) -> dict[str, Any]:
    return {"kind": "closed", "concurrency": clients}
