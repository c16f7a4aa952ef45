"""The page of a report in a real browser, as wide as a phone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from evenflow.report.page import page, picture
from evenflow.report.plots import panels, svg
from tests.browser.page import browser

pytest.importorskip("selenium", reason="needs selenium: pip install selenium")
pytestmark = pytest.mark.skipif(not shutil.which("chromedriver"), reason="needs chromium-driver")

WIDTH = "return document.querySelector('.picture svg').getBoundingClientRect().width"


@pytest.mark.pictures
def test_a_picture_of_one_panel_fits_a_phone_and_of_three_can_be_read(tmp_path: Path) -> None:
    widths = []
    with browser(390) as found:
        for count in (1, 3):
            figure, _ = panels(count, 4, 3)
            text = page("A sweep", [picture(svg(figure, "drawn"))], {})
            (tmp_path / "page.html").write_text(text)
            found.driver.get((tmp_path / "page.html").as_uri())
            widths.append(found.run(WIDTH))
    assert widths[0] < 370
    assert widths[1] == pytest.approx(3 * widths[0], rel=0.01)
