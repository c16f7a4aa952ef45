"""The page of `explore` in a real browser: sliders, words, keyboard, and what is left behind."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.page import Page, browser, served
from tests.command_line import done

pytest.importorskip("selenium", reason="needs selenium: pip install selenium")
pytestmark = pytest.mark.skipif(not shutil.which("chromedriver"), reason="needs chromium-driver")

RUN = """\
# short of pages
model: Qwen2.5-32B
gpu: L20
stages: 4
link: pcie-l20
runtime: gllm
kv: {pages: 700}
scheduler: token_throttling
workload: {trace: sharegpt-sample, requests: 80, arrivals: {kind: poisson, rate: 4}}
"""
KV_THRESH, RATE = "set-scheduler-kv_thresh", "set-workload-arrivals-rate"
WIDER = """\
return [...document.querySelectorAll('.js-plotly-plot')].filter(
  each => each.querySelector('.main-svg').clientWidth > each.parentElement.clientWidth + 1
).map(each => each.id)"""
"""The pictures that reach beyond their places."""
ENDS = """\
const ticks = [...document.querySelectorAll('[data-figure=causes] .xtick text')];
return [ticks[0], ticks.at(-1)].map(each => each.textContent)"""
AXE = Path("node_modules/axe-core/axe.min.js")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("explored")
    (folder / "RUN.yaml").write_text(RUN)
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[tuple[str, int]]:
    with served(folder, ["RUN.yaml", "--slo", "p99_ttft_ms=2000"]) as found:
        yield found


@pytest.fixture(
    params=[
        pytest.param((1280, False), id="wide and light"),
        pytest.param((480, True), id="narrow and dark", marks=pytest.mark.long),
    ]
)
def page(request: pytest.FixtureRequest) -> Iterator[Page]:
    width, dark = request.param
    with browser(width, dark=dark) as found:
        yield found
        assert not found.complaints()


def test_a_page_is_used(page: Page, address: tuple[str, int]) -> None:
    page.open(address[0])
    assert page.text("#sample").startswith("80 requests, simulated and drawn in")
    assert page.run("return document.documentElement.scrollWidth <= innerWidth")
    assert page.run("return document.querySelectorAll('.js-plotly-plot').length") == 10

    page.find("#pin").click()
    page.change(lambda: page.slide(KV_THRESH, 0.6))
    assert "kv_thresh: 0.3}" in page.run("return document.getElementById('text').value")
    first, pinned = page.tile("preemptions")[-2:]
    assert int(first.split()[0]) < int(pinned)
    assert "▼" in first
    assert "pinned: kv_thresh 0.05" in page.text("#runs")

    def both() -> None:
        page.run(  # the first question is given up before it is answered
            "for (const [id, at] of arguments[0]) { const it = document.getElementById(id);"
            "it.value = at; it.dispatchEvent(new Event('input')); ask(); }",
            [[f"{RATE}-in", 250], ["set-workload-seed-in", 500]],
        )

    page.change(both)
    assert "rate: 1.41}, seed: 10}" in page.run("return document.getElementById('text').value")

    before = page.run("return [view.from, view.to]")
    page.find(".timeline button").click()
    after = page.run("return [view.from, view.to]")
    assert after[1] - after[0] == pytest.approx((before[1] - before[0]) / 2)

    link, command = page.run("return [location.href, document.getElementById('command').innerText]")
    tiles = page.text("#tiles")
    page.driver.get("about:blank")
    page.open(link)
    assert page.run("return document.getElementById('command').innerText") == command
    assert page.text("#tiles") == tiles

    text = page.find("#text")
    page.change(lambda: text.send_keys("\nstagse: 3"))
    assert page.text("#error").startswith(
        'RUN.yaml:11: unknown key "stagse"; did you mean "stages"'
    )
    exact = page.find(f"#{KV_THRESH} input[type=text]")
    page.change(lambda: text.send_keys("\b" * 10))
    assert page.text("#error") == ""
    page.change(lambda: exact.send_keys("\b" * 5 + "2\t"))
    assert "kv_thresh should be less than 1.0, not 2" in page.text("#error")


def test_the_head_says_what_each_side_is_simulated_on(folder: Path) -> None:
    """vLLM's policy has limits by the card, gLLM's has none."""
    words = ["RUN.yaml", "--schedulers", "token_throttling,vllm_v1"]
    with served(folder, words) as (address, _), browser() as page:
        page.open(address)
        first, second = page.text("#status").split("; ")
        assert first.startswith("A simulated: Qwen2.5-32B on 4 x L20, PP4, link pcie-l20, CPU")
        assert second.startswith("B simulated: Qwen2.5-32B on 4 x L20, PP4, link pcie-l20, CPU")
        assert "max_num_seqs 256 (default)" in second.removeprefix(first)
        page.change(lambda: page.slide("set-stages", 1.0))
        assert page.text("#status").count(" on 16 x L20, PP16, ") == 2
        page.change(lambda: page.find("#text").send_keys("\nstagse: 3"))
        assert page.text("#status") == "not simulated"


@pytest.mark.long
def test_a_slider_is_swept(page: Page, address: tuple[str, int]) -> None:
    page.open(address[0])
    page.find(f"#{KV_THRESH} button").click()
    page.until(lambda: "mean and 95 % interval" in page.text("#swept-told"))
    assert page.run("return document.getElementById('swept-figure').data[0].x.length") == 7


@pytest.mark.long
def test_the_keyboard_suffices(page: Page, address: tuple[str, int]) -> None:
    page.open(address[0])
    slider = page.find(f"#{KV_THRESH}-in")
    page.run("arguments[0].focus()", slider)
    page.change(lambda: slider.send_keys("\ue014" * 3))  # the right arrow
    assert (
        page.run("return told.schedulers[0].find(e => e.key === 'scheduler.kv_thresh').value")
        > 0.05
    )
    canvas = page.find(".timeline canvas")
    canvas.send_keys("n")
    assert "stage 0" in page.text(".timeline output")
    span = page.run("return view.to - view.from")
    canvas.send_keys("-")
    assert page.run("return view.to - view.from") > span
    reached = set()
    page.run("document.activeElement.blur()")
    for _ in range(120):
        page.driver.switch_to.active_element.send_keys("\t")
        reached.add(page.run("return document.activeElement.id || document.activeElement.tagName"))
    assert {f"{KV_THRESH}-in", "text", "pin", "copy", "CANVAS", "BUTTON"} <= reached


@pytest.mark.long
@pytest.mark.skipif(not AXE.exists(), reason="needs axe-core: npm install --no-save axe-core")
def test_the_page_breaks_no_rule_of_accessibility(page: Page, address: tuple[str, int]) -> None:
    page.open(address[0])
    page.find("#pin").click()
    page.driver.execute_script(AXE.read_text(encoding="utf-8"))
    found = page.driver.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    broken = [(each["id"], each["nodes"][0]["html"][:200]) for each in found["violations"]]
    assert not broken


@pytest.mark.long
def test_ten_pages_and_a_thousand_moves_leave_nothing(address: tuple[str, int]) -> None:
    link, server = address
    with browser() as page:
        page.open(link)
        before = left_of(server)
        for _ in range(9):
            page.driver.switch_to.new_window("tab")
            page.open(link)
        for at in range(1000):
            page.slide(KV_THRESH, (at % 101) / 100)
        page.until(lambda: page.run("return document.body.dataset.state") == "done")
        page.change(lambda: page.slide(KV_THRESH, 0.5))
    limit_s = time.monotonic() + 20
    while (after := left_of(server)) != before and time.monotonic() < limit_s:
        time.sleep(0.1)
    assert after == before


def left_of(server: int) -> tuple[int, int]:
    """Return how many sockets and pipes a process has open, less a browser's, and its children."""
    files = []
    for each in Path(f"/proc/{server}/fd").iterdir():
        try:
            files.append(os.readlink(each))
        except OSError:
            continue
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    return len([each for each in files if each.startswith("pipe")]), len(children)


@pytest.mark.long
def test_a_page_is_opened_from_disk_without_a_network(
    page: Page, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    words = ["--vary", "scheduler.kv_thresh=0.05,0.3", "--schedulers", "token_throttling,sarathi"]
    done("explore", str(folder / "RUN.yaml"), "--out", str(out), *words)
    assert out.stat().st_size < 3_000_000
    page.open(f"file://{out}")
    assert page.run(WIDER) == []
    assert page.run(ENDS) == ["0", "100"]
    before = page.tile("preemptions")
    page.change(lambda: page.slide("set-scheduler-kv_thresh", 1.0))
    assert page.tile("preemptions") != before
    assert page.run("return runs.length") == 2
