"""Fit a GPU's efficiencies on linear operators that Vidur published; say how far off they are.

`python -m tools.calibrate_vidur mlp.csv` with Vidur's file (MIT licence, not carried
here): data/profiling/compute/a40/meta-llama/Llama-2-70b-hf/mlp.csv of
github.com/microsoft/vidur, commit e26eb8f. Its medians, of one layer on 1, 2, 4 and 8 ranks. Knows
nothing of attention, which that file lacks. Needs the extra `fit`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evenflow.costs.formulas import Rates, linear_s
from evenflow.errors import UsageError
from evenflow.specs.gpu import GpuSpec, gpu
from evenflow.specs.model import ModelSpec, model
from profiler import import_files
from tools.efficiencies import (
    Efficiencies,
    Errors,
    Floats,
    bundled,
    errors_of,
    soft_fit,
)

LINEARS = ("linear_qkv", "linear_o", "linear_up", "linear_down")
TILE_TOKENS = 128


class Layers(NamedTuple):
    """Seconds of the four linear operators of a layer, by (tokens, ranks)."""

    model: ModelSpec
    sizes: list[tuple[int, int]]
    seconds: Floats


def read_layers(path: Path, spec: ModelSpec) -> Layers:
    """Read Vidur's file; UsageError where it has no size with all four operators."""
    profile = import_files([path], spec, "as in the file", "float16").profile
    found: dict[tuple[int, int], dict[str, float]] = defaultdict(dict)
    for point in profile.points:
        if point.operator in LINEARS:
            assert point.tokens is not None  # the importer gives linear operators their tokens
            found[point.tokens, point.ranks][point.operator] = point.median_s
    whole = {size: sum(times.values()) for size, times in found.items() if len(times) == 4}
    if not whole:
        raise UsageError(f"{path}: no number of tokens has all of {', '.join(LINEARS)}")
    return Layers(spec, list(whole), np.array(list(whole.values())))


def predicted(layers: Layers, base: GpuSpec, efficiencies: Efficiencies) -> Floats:
    """Return the roofline's seconds of the same operators, the overhead of a layer included."""
    rates = Rates(
        base.fp16_tflops * 1e12 * efficiencies.compute,
        base.memory_bandwidth_gb_s * 1e9 * efficiencies.bandwidth,
    )
    spec = layers.model
    return np.array(
        [
            efficiencies.per_layer_overhead_s
            + sum(
                linear_s(tokens, shape, spec.dtype_bytes, TILE_TOKENS, rates)
                for shape in spec.linear_shapes(ranks)
            )
            for tokens, ranks in layers.sizes
        ]
    )


def fit(layers: Layers, base: GpuSpec) -> Efficiencies:
    """Return the efficiencies of least relative error, soft, as `calibrate_silicon` does."""
    return soft_fit(lambda candidate: predicted(layers, base, candidate), layers.seconds)


def errors(layers: Layers, base: GpuSpec, efficiencies: Efficiencies) -> Errors:
    """Return how far the roofline is from the published times."""
    return errors_of(predicted(layers, base, efficiencies), layers.seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the fit, and the efficiencies that `gpu.py` carries, with their errors."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="Vidur's mlp.csv")
    parser.add_argument("--gpu", default="A40")
    parser.add_argument("--model", default="Llama2-70B")
    chosen = parser.parse_args(arguments)
    layers, base = read_layers(chosen.file, model(chosen.model)), gpu(chosen.gpu)
    print(f"{len(layers.sizes)} sizes (tokens, ranks) of {chosen.model} on {chosen.gpu}\n")
    print("| efficiencies | compute | bandwidth | overhead per layer | mean error | P95 |")
    print("|---|---|---|---|---|---|")
    for name, found in (("fitted", fit(layers, base)), ("bundled", bundled(base))):
        off = errors(layers, base, found)
        print(
            f"| {name} | {found.compute:.3f} | {found.bandwidth:.3f} "
            f"| {found.per_layer_overhead_s * 1e6:.1f} us | {off.mean:.1%} | {off.p95:.1%} |"
        )


if __name__ == "__main__":
    main()
