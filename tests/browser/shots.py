"""Make the pictures of docs/explore.md anew: `python -m tests.browser.shots docs/figures`."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from tests.browser.page import Page, browser, served

ROOT = Path(__file__).parents[2]
WORDS = ["examples/short-kv.yaml", "--slo", "p99_ttft_ms=10000"]
KV_THRESH = "set-scheduler-kv_thresh"


def main(folder: Path) -> None:
    """Tell the story of one slider in six pictures."""

    def shoot(name: str, from_: str, height: int, above: int = 0) -> None:
        resized(page, height)
        page.run("document.querySelector(arguments[0]).scrollIntoView()", from_)
        page.run("scrollBy(0, -arguments[0])", above)
        time.sleep(1)
        page.driver.save_screenshot(str(folder / f"explore-{name}.png"))
        resized(page, 1000)

    with served(ROOT, WORDS) as (address, _), browser() as page:
        page.open(address)
        shoot("opens", "body", 900)
        page.run("view.show(58, 60)")
        hover(page, 0.49)
        shoot("waits", "#timelines", 330)
        page.find("#pin").click()
        page.change(lambda: page.slide(KV_THRESH, 0.6))
        shoot("pinned", "body", 620)
        shoot("pages", "[data-figure=kv]", 430, 110)
        page.find(f"#{KV_THRESH} button").click()
        page.until(lambda: "mean and" in page.text("#swept-told"))
        page.run(
            "const it = document.getElementById('swept-metric'); it.selectedIndex = 2;"
            "it.dispatchEvent(new Event('change'))"
        )
        shoot("swept", "#swept", 420)
    both = [*WORDS, "--schedulers", "token_throttling,sarathi"]
    with served(ROOT, both) as (address, _), browser(dark=True) as page:
        page.open(address)
        shoot("beside", "#timelines", 560)


def resized(page: Page, height: int) -> None:
    """Give the window a height."""
    size = {"width": 1280, "height": height, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def hover(page: Page, share: float) -> None:
    """Point at the first stage."""
    page.run(
        "const it = document.querySelector('.timeline canvas'), box = it.getBoundingClientRect();"
        "it.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + arguments[0] * "
        "box.width, clientY: box.top + 15}))",
        share,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
