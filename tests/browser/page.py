"""A page of `evenflow explore` in a real browser, for its tests and for how fast it is."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LIMIT_S = 60.0


class Page:
    """A page in Chromium without a window; `driver` is Selenium's."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.run = driver.execute_script

    def open(self, address: str) -> None:
        """Open an address, and wait for the whole run."""
        self.driver.get(address)
        self.until(lambda: self.run("return document.body.dataset.state") == "done")

    def until(self, true: Callable[[], Any]) -> None:
        """Wait until something is true, at most LIMIT_S."""
        limit_s = time.monotonic() + LIMIT_S
        while not true():
            assert time.monotonic() < limit_s, self.run("return document.body.innerText")
            time.sleep(0.02)

    def find(self, selector: str) -> Any:
        """Return the first element of a selector."""
        return self.driver.find_element("css selector", selector)

    def text(self, selector: str) -> str:
        """Return the words of the first element of a selector."""
        return str(self.find(selector).text)

    def change(self, does: Callable[[], Any]) -> None:
        """Do something after which a run is simulated, and wait for all of it."""
        self.run("document.body.dataset.state = 'to come'")
        does()
        self.until(lambda: self.run("return document.body.dataset.state") == "done")

    def slide(self, id: str, share: float) -> None:
        """Move a slider to a share of its range."""
        self.run(
            "const it = document.getElementById(arguments[0]); it.value = arguments[1];"
            "it.dispatchEvent(new Event('input'))",
            f"{id}-in",
            str(1000 * share),
        )

    def tile(self, name: str) -> list[str]:
        """Return the lines of a tile."""
        tiles = [
            each.text.splitlines() for each in self.driver.find_elements("css selector", ".tile")
        ]
        return next(lines for lines in tiles if lines[0] == name)

    def complaints(self) -> list[str]:
        """Return what the browser complains of."""
        return [each["message"] for each in self.driver.get_log("browser")]


@contextmanager
def browser(width: int = 1280, *, dark: bool = False) -> Iterator[Page]:
    """Give a page in Debian's Chromium, which reaches no other host than this one."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    for word in (
        *("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "hide-scrollbars"),
        *("disable-background-networking", f"window-size={max(width, 500)},1000"),
        "host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ):
        options.add_argument(f"--{word}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(shutil.which("chromedriver"))
    driver = webdriver.Chrome(options=options, service=service)
    try:
        size = {"width": width, "height": 1000, "deviceScaleFactor": 1, "mobile": False}
        driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        yield Page(driver)
    finally:
        driver.quit()


@contextmanager
def served(folder: Path, words: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Give the address of a page of the command, and its process id."""
    command = [sys.executable, "-m", "evenflow", "explore", *words, "--no-browser"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip(), process.pid
        finally:
            process.terminate()
