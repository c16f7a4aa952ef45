"""Measure how long a slider's move takes to be seen: `python -m tests.browser.times`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

from tests.browser.page import browser, served

RUN = Path(__file__).parents[2] / "examples/quickstart.yaml"
MOVES = 9


def main() -> None:
    """Print the median of MOVES moves, in seconds: to the first picture, and to the whole run."""
    for requests in (500, 5000):
        words = [str(RUN), "--set", f"workload.requests={requests}"]
        with (
            tempfile.TemporaryDirectory() as folder,
            served(Path(folder), words) as (address, _),
            browser() as page,
        ):
            page.open(address)
            page.run(
                "window.times = []; new MutationObserver(() => times.push(performance.now()))"
                ".observe(document.body, {attributes: true, attributeFilter: ['data-shown']})"
            )
            firsts, wholes = [], []
            for move in range(MOVES):
                page.run("times.length = 0; window.since = performance.now()")
                page.change(lambda at=move: page.slide("set-scheduler-kv_thresh", (at + 1) / 20))
                first, *_, whole = page.run("return times.map(each => each - since)")
                firsts.append(first / 1000)
                wholes.append(whole / 1000)
            first, whole = median(firsts), median(wholes)
            print(f"{requests} requests: first picture {first:.2f} s, whole run {whole:.2f} s")


if __name__ == "__main__":
    main()
