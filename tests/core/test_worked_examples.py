"""Sarathi-Serve's worked examples, figures 7 and 8: times by hand, of 1 s and 10 ms a token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from evenflow.experiments.figures import FOLDER
from evenflow.experiments.figures.scenarios import played
from evenflow.results.bubbles import attribute
from evenflow.results.run import RunResult
from evenflow.types import Request
from tests.figure_studies import study_of


def run_of(figure: str, system: str, folder: Path) -> RunResult:
    study = study_of(figure, folder)
    lines = (FOLDER / f"{figure}.csv").read_text(encoding="utf-8").split()[1:]
    rows = [line.split(",") for line in lines]
    requests = [
        Request(n, float(at_s), int(prompt), int(output))
        for n, (prompt, output, at_s) in enumerate(rows)
    ]
    return played(study, requests, study.system(system))


STALLS = {
    "vLLM": ("3 p800 4d 4d 4d 2d 2d 2d 2d", 9.0 + 1.04),
    "Orca": ("3 p800+2d 4d 4d 4d 2d 2d 2d", 9.02),
    "FasterTransformer": ("3 2d 2d 2d 2d 2d 2d 2d p800 2d 2d 2d", 1.02),
    "Sarathi-Serve": ("3 p200+2d p200+2d p199+3d p199+3d p2+3d 3d 3d 1d", 3.02),
}
"""Micro-batches after A's and B's prompts (3 s) and their first decodes, and the longest time
between tokens that A waits."""


@pytest.mark.parametrize("system", STALLS)
def test_figure_7_decodes_wait_for_prompts_but_in_chunks(system: str, tmp_path: Path) -> None:
    result = run_of("sarathi_7", system, tmp_path)
    words, longest_s = STALLS[system]
    batches = list(zip(result.prefill_tokens.tolist(), result.decode_tokens.tolist(), strict=True))
    assert batches[:2] == [(200, 0), (0, 2)]
    said = ["+".join([f"p{p}"] * (p > 0) + [f"{d}d"] * (d > 0)) for p, d in batches[2:]]
    assert f"3 {' '.join(said)}" == words
    seconds = [1 + 0.01 * (prefill + decode) for prefill, decode in batches]
    assert result.end_s[:, 0] == pytest.approx(np.cumsum(seconds))
    with_a = result.returned_s[result.decode_tokens > 0][:8]  # A has nine tokens
    assert np.diff(with_a, prepend=3.0).max() == pytest.approx(longest_s)


BUBBLES = {
    # Stage 0 waits from 6 to 8 s, until the prompt of 300 is back, stage 1 from 10 to 16.01 s for
    # the prompts of 700; one decode waits for those from 17.02 to 24.02 s; 4 and 1 take turns.
    "Orca": (2 + 6.01, 7.0, 4 * 0.03 + 2 * 0.02),
    "Sarathi-Serve": (2 * 0.02 + 2 * 0.04, 0.93, 3 * 0.02),
}
"""Seconds of PB1 to PB3 over both stages."""


@pytest.mark.parametrize("system", BUBBLES)
def test_figure_8_has_all_three_bubbles_and_uniform_micro_batches_few(
    system: str, tmp_path: Path
) -> None:
    totals = attribute(run_of("sarathi_8", system, tmp_path)).totals()
    found = {cause: seconds for cause, seconds in totals.items() if seconds > 1e-9}
    fill_drain = found.pop("fill_drain")
    assert found == pytest.approx(
        dict(
            zip(("uneven_prefill", "prefill_decode", "uneven_decode"), BUBBLES[system], strict=True)
        )
    )
    assert fill_drain == pytest.approx({"Orca": 4 + 1.01, "Sarathi-Serve": 2.02 + 1.03}[system])
