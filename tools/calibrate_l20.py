"""Fit a GPU's efficiencies on whole-model times measured on L20; show how well they carry over.

`python -m tools.calibrate_l20 FOLDER`, with the folder of the measured files, prints
the fits in both directions and the published facts, and writes the figure.
Knows the layout of those files; the formulas are `evenflow.costs`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from evenflow.costs import RooflineCost, prefill_work
from evenflow.errors import UsageError
from evenflow.specs.deployment import Deployment
from evenflow.specs.gpu import GpuSpec, gpu
from evenflow.specs.model import ModelSpec, model
from tools.efficiencies import (
    Efficiencies,
    Errors,
    Floats,
    errors_of,
    least_squares_fit,
)
from tools.published_facts import facts_table, published_facts

FILES = {"Qwen2.5-32B": "tdpipe_L20-Qwen2.5-32B.csv", "Llama2-13B": "tdpipe_L20-Llama-13B.csv"}
"""Model -> its file of measured times."""


class Profile(NamedTuple):
    """Measured seconds of a whole model for prompts of `tokens` tokens, one prompt a batch."""

    model: ModelSpec
    tokens: list[int]
    seconds: Floats


def read_profile(path: Path, spec: ModelSpec) -> Profile:
    """Read a file with the columns `Total Length` (tokens) and `Execute Time` (milliseconds)."""
    try:
        table = np.loadtxt(path, delimiter=",", skiprows=1)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: not a table of length and time ({error})") from error
    return Profile(spec, [int(tokens) for tokens in table[:, 0]], table[:, 1] / 1000)


def predict(profile: Profile, base: GpuSpec, efficiencies: Efficiencies) -> Floats:
    """Return the predicted seconds for each length: all layers, embedding and head on one stage."""
    layers = (profile.model.num_layers,)
    cost = RooflineCost(Deployment(profile.model, efficiencies.on(base), layers))
    return np.array([cost(0, prefill_work(tokens)) for tokens in profile.tokens])


def fit(profiles: Sequence[Profile], base: GpuSpec) -> Efficiencies:
    """Return the efficiencies with the least squared relative error over all lengths.

    Every length of a file counts the same, so lengths over one tile (128 tokens) decide.
    """

    def relative_errors(candidate: Efficiencies) -> Floats:
        parts = [predict(each, base, candidate) / each.seconds - 1 for each in profiles]
        return np.concatenate(parts)

    return least_squares_fit(relative_errors, (0.9, 0.9, 1.0))


def errors(profile: Profile, base: GpuSpec, efficiencies: Efficiencies) -> Errors:
    """Return how far the prediction is from a profile."""
    return errors_of(predict(profile, base, efficiencies), profile.seconds)


def report(profiles: Sequence[Profile], base: GpuSpec) -> str:
    """Return the table of fits: each model alone and both, against each model."""
    lines = [
        "| fitted on | compute | bandwidth | overhead per layer | predicts | mean | P95 | worst |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for chosen in [*([profile] for profile in profiles), list(profiles)]:
        found = fit(chosen, base)
        names = " + ".join(profile.model.name for profile in chosen)
        for profile in profiles:
            off = errors(profile, base, found)
            lines.append(
                f"| {names} | {found.compute:.4f} | {found.bandwidth:.4f} "
                f"| {found.per_layer_overhead_s * 1e6:.1f} us | {profile.model.name} "
                f"| {off.mean:.2%} | {off.p95:.2%} | {off.worst:.1%} |"
            )
    return "\n".join(lines)


def draw(profiles: Sequence[Profile], base: GpuSpec, path: Path) -> None:
    """Write the figure: measured and predicted time per length, each model from the other's fit."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(
        2, len(profiles), figsize=(11, 6), sharex=True, height_ratios=(3, 1), squeeze=False
    )
    for column, profile in enumerate(profiles):
        others = [each for each in profiles if each is not profile]
        predicted = predict(profile, base, fit(others, base))
        off = predicted / profile.seconds - 1
        top, bottom = axes[0][column], axes[1][column]
        top.plot(profile.tokens, profile.seconds * 1000, ".", ms=2.5, color="0.6", label="measured")
        label = f"predicted, fitted on {others[0].model.name}"
        top.plot(profile.tokens, predicted * 1000, "-", lw=1.2, color="C3", label=label)
        top.set_title(f"{profile.model.name} on {base.name}: mean error {np.abs(off).mean():.1%}")
        top.set_ylim(bottom=0)
        top.legend(frameon=False, loc="upper left")
        bottom.plot(profile.tokens, off * 100, "-", lw=0.8, color="C3")
        bottom.axhline(0, color="0.3", lw=0.6)
        bottom.set_ylim(-25, 25)
        bottom.set_xticks(range(0, 2049, 256))
        bottom.set_xlabel("tokens in one prefill micro-batch")
        for axis in (top, bottom):
            axis.grid(axis="x", color="0.9", lw=0.6)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_ylabel("whole model, ms")
    axes[1][0].set_ylabel("error, %")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of fits and the table of facts, write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="holds the measured files")
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/l20_calibration.png"))
    chosen = parser.parse_args(arguments)
    base = gpu("L20")
    profiles = [read_profile(chosen.folder / file, model(name)) for name, file in FILES.items()]
    print(report(profiles, base))
    print(f"\n{facts_table(published_facts())}")
    chosen.figure.parent.mkdir(parents=True, exist_ok=True)
    draw(profiles, base, chosen.figure)
    print(f"\n{chosen.figure}")


if __name__ == "__main__":
    main()
