"""The built-in page in headless Chromium: drawn, legible, usable, and told apart when daemon or engine is gone.

Needs the package playwright and Chromium (Debian: chromium). With SCREENSHOTS=FOLDER pictures are kept to be looked at.
"""

from __future__ import annotations

import math
import os
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from waiting import until

from autotune.admin_token import read_token
from autotune.decisions import DecisionRecord
from engine.clock import ManualClock
from engine.stats import ResidentBytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZES = (1280, 400)
SCHEMES = ("light", "dark")
PAUSE_S = 0.05
ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip
HOSTILE = '<img src="x" onerror="document.title=1"><script>document.title=2</script> & "so on"'

# Contrast by WCAG 2 of every text with what lies behind it; SVG text has its colour in fill.
CONTRASTS = """() => {
  const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
    .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const behind = (node) => {
    for (let one = node; one; one = one.parentElement) {
      const color = parse(getComputedStyle(one).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].filter((one) => one.nodeType === 3).map((one) => one.textContent.trim()).join("");
    const box = node.getBoundingClientRect();
    if (!own || !box.width || box.right < 0 || node.closest("title, option, noscript") || node.disabled) continue;
    const style = getComputedStyle(node);
    const [one, other] = [light(parse(node instanceof SVGElement ? style.fill : style.color)), light(behind(node))];
    found.push({
      text: own.slice(0, 40),
      size: parseFloat(style.fontSize),
      contrast: (Math.max(one, other) + 0.05) / (Math.min(one, other) + 0.05),
    });
  }
  return found;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed (pip install -e '.[browser]')"
    )
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.skip("Chromium is not installed (Debian: chromium)")
    with driver.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=list(ARGUMENTS))
        yield launched
        launched.close()


class Lively:
    """A daemon with half an hour behind it, whose loop goes on turning in a thread, faster than time does."""

    def __init__(self, rig: Any) -> None:
        self.rig = rig
        self.seconds = 0
        rig.run_s(1800, self.load)
        for record in decisions(rig.clock.wall_s()):
            rig.parts.decisions.append(record)
        rig.daemon.admin.start()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._turn)
        self._thread.start()

    @property
    def url(self) -> str:
        return str(self.rig.daemon.admin.address)

    def load(self) -> None:
        """A load that comes and goes, with a burst that is too much, in several formats."""
        self.seconds += 1
        engine, wave = self.rig.engine, 0.5 + 0.4 * math.sin(self.seconds / 90)
        burst = 0.09 if 900 < self.seconds % 1500 < 1100 else 0.0
        engine.set_usage(min(1.0, wave + burst), running=round(60 * wave), waiting=round(400 * burst))
        used = engine.figures.gauges.kv_used_bytes
        shares = {"native": 1 - 0.7 * wave, "int8": 0.3 * wave, "k8v4": 0.2 * wave, "int4": 0.2 * wave}
        engine.figures.gauges.resident = [
            ResidentBytes(name, 32, round(share * used), used // 1024) for name, share in shares.items()
        ]
        engine.serve_requests(3, ttft_s=0.05 + 0.2 * wave + 40 * burst, gap_s=0.01 + 0.08 * wave)

    def _turn(self) -> None:
        while not self._ended.wait(PAUSE_S):
            self.load()
            self.rig.run_s(1)

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self.rig.daemon.admin.stop()


def decisions(wall_s: float) -> list[DecisionRecord]:
    effect = {
        "before": {"ttft_tail_s": 3.83, "tbt_tail_s": 0.016, "goodput_rps": 1.23, "kv_usage": 0.99},
        "after": {"ttft_tail_s": 1.73, "tbt_tail_s": 0.033, "goodput_rps": 3.35, "kv_usage": 0.71},
        "outcome": "met",
        "why": "ttft_tail_s 3.83 -> 1.73 s, predicted 0.9",
    }
    scarce = "demand grows towards what the pool holds natively: kv_demand 0.85; kv_format native -> int4"
    rows: list[dict[str, Any]] = [
        {"verdict": "converging", "reason": scarce, "effect": effect,
         "predicted": {"ttft_tail_s": 0.9, "kv_usage": 0.6}},
        {"verdict": "over_budget", "reason": scarce, "why": "int4 would lose 1.2 % of 0.5 %"},
        {"verdict": "advised", "reason": scarce, "why": "mode is advise: not written"},
        {"scenario": "override", "writer": "operator:anna", "reason": HOSTILE, "why": "set by operator:anna"},
        {"scenario": "rollback", "verdict": "applied", "reason": "block_size=64 of tick 7 missed", "effect": {
            **effect, "outcome": "missed"}},
    ]  # fmt: skip
    base = {"knob": "kv_format", "old": "native", "new": "int4", "scenario": "memory-scarce", "reason": "",
            "writer": "autotune", "verdict": "applied", "why": ""}  # fmt: skip
    return [
        DecisionRecord(**{"tick": 1000 + index, "wall_s": wall_s - 700 + 150 * index, **base, **row})
        for index, row in enumerate(rows)
    ]


@pytest.fixture
def lively(make_rig: Any) -> Iterator[Lively]:
    made = Lively(make_rig("admin: {port: 0}\n", clock=ManualClock(5 * 10**9, time.time())))
    yield made
    made.stop()


class Visit:
    """A page with everything that it asked for and complained about. Its policy forbids eval to a driver, too."""

    def __init__(self, browser: Any, url: str, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[Any] = []
        self.page.on("console", lambda one: self.complaints.append(one.text) if one.type == "error" else None)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", self._note_request)
        self.page.goto(url)
        self.page.wait_for_selector(".line.look-1[d]", state="attached")
        self.page.wait_for_selector(".decision")

    def _note_request(self, request: Any) -> None:  # a built-in method will not do
        self.requests.append(request)

    def close(self) -> None:
        self.context.close()


def picture(visit: Visit, name: str) -> None:
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        visit.page.screenshot(path=str(Path(folder) / f"{name}.png"), full_page=True)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", SIZES)
def test_it_is_whole_and_legible(browser: Any, lively: Lively, width: int, scheme: str) -> None:
    visit = Visit(browser, lively.url, width, scheme)
    page = visit.page
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    picture(visit, f"page-{width}-{scheme}")
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "it scrolls sideways"
    assert page.locator(".chart").count() == 6
    for index in range(6):
        assert page.locator(".chart").nth(index).locator("path[d]").count() > 0, f"plot {index} is empty"
    assert page.locator(".area.look-4[d]").count() == 1, "int4 is plotted"
    assert page.locator(".line.limit[d]").count() == 3, "pool, both targets"
    assert page.locator(".mark").count() > 0, "decisions are marked"
    found = page.evaluate(CONTRASTS)
    assert len(found) > 80
    small = [one for one in found if one["size"] < 12]
    faint = [one for one in found if one["contrast"] < 4.5]
    assert small == []
    assert faint == []
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(16, 21, 27)"
    assert dark == (scheme == "dark")
    assert {request.url.split("/")[2] for request in visit.requests} == {lively.url.split("/")[2]}
    assert visit.complaints == []
    visit.close()


def test_what_comes_in_is_shown_as_text(browser: Any, lively: Lively) -> None:
    visit = Visit(browser, lively.url)
    page = visit.page
    assert page.get_by_text(HOSTILE).count() == 1
    assert page.locator("main img, main script").count() == 0
    assert page.title() == "kv-autotune"
    visit.close()


def test_orders_need_the_token_and_do_not_leak_it(browser: Any, lively: Lively) -> None:
    visit = Visit(browser, lively.url)
    page, token = visit.page, read_token(lively.rig.folder / "admin.token")
    assert page.get_by_role("button", name="advise: decides").is_disabled()
    page.get_by_label("Token", exact=True).fill("x" * 43)
    page.get_by_role("button", name="Use", exact=True).click()
    page.get_by_role("button", name="advise: decides").click()
    page.wait_for_selector(".answer-bad")
    assert "a token is needed" in page.locator(".answer").inner_text()
    assert lively.rig.daemon.status()["mode"] == "active"

    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_role("button", name="Use", exact=True).click()
    page.get_by_role("button", name="advise: decides").click()
    page.wait_for_selector(".answer-good")
    page.wait_for_selector("button[aria-pressed=true]:has-text('advise')")
    assert page.locator(".fact").nth(2).inner_text().endswith("advise, by order")

    page.get_by_label("Knob", exact=True).select_option("block_size")
    page.get_by_label("Value", exact=True).select_option("64")
    page.get_by_label("For", exact=True).select_option("3600")
    page.get_by_label("Reason", exact=True).fill("incident 7")
    page.get_by_label("Your name", exact=True).fill("anna")
    page.get_by_role("button", name="Set", exact=True).click()
    page.wait_for_selector(".answer-good:has-text('block_size=64')")
    writer = lively.rig.engine.state.writers["block_size"]
    assert writer.writer.startswith("operator:anna;until=")
    assert writer.reason == "incident 7"
    page.get_by_role("button", name="Give block_size back to the daemon").click()
    page.wait_for_selector(".answer-good:has-text('given back')")
    picture(visit, "controls")

    orders = [request for request in visit.requests if request.method == "POST"]
    assert orders[-1].headers["authorization"] == f"Bearer {token}"
    assert not [request.url for request in visit.requests if token in request.url or "xxxx" in request.url]
    assert page.evaluate("sessionStorage.length + localStorage.length") == 0, "it is kept only if asked to"
    assert token not in page.content()
    visit.page.get_by_label("Token", exact=True).fill(token)
    page.get_by_label("keep it until").check()
    page.get_by_role("button", name="Use", exact=True).click()
    assert page.evaluate("Object.values(sessionStorage)") == [token]
    page.get_by_role("button", name="Forget").click()
    assert page.evaluate("sessionStorage.length") == 0
    # The refused order is the browser's own complaint.
    assert [one for one in visit.complaints if "401" not in one] == []
    visit.close()


def test_one_sees_when_engine_or_daemon_is_gone(browser: Any, lively: Lively) -> None:
    visit = Visit(browser, lively.url)
    page = visit.page
    assert page.locator(".alert").count() == 0
    lively.rig.engine.alive = False
    page.wait_for_selector(".alert:has-text('Engine gone')", timeout=60_000)
    assert page.locator("body.stale").count() == 1
    picture(visit, "engine-gone")
    lively.rig.engine.alive = True
    page.wait_for_selector(".alert", state="detached", timeout=60_000)
    lively.rig.daemon.admin.stop()
    page.wait_for_selector(".alert:has-text('does not answer')", timeout=60_000)
    assert page.locator("body.stale").count() == 1
    assert page.locator(".fact", has_text="Daemon").inner_text().endswith("no answer")
    picture(visit, "daemon-gone")
    visit.close()


def test_it_can_be_used_with_the_keyboard_alone(browser: Any, lively: Lively) -> None:
    visit = Visit(browser, lively.url)
    page = visit.page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(12):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.matches('.plot')"):
            break
    assert page.evaluate("document.activeElement.matches('.plot')")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("#cursor:has-text('Figures at')")
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith("Load, at ")
    page.keyboard.press("Shift+ArrowLeft")
    until(lambda: page.evaluate("document.activeElement.getAttribute('aria-label')") != label, "an earlier point")
    page.keyboard.press("Escape")
    page.wait_for_selector("#cursor:has-text('Figures are')")
    reached = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    assert {"token", "keep"} <= reached
    visit.close()


def test_the_time_shown_can_be_chosen(browser: Any, lively: Lively) -> None:
    visit = Visit(browser, lively.url)
    page = visit.page
    length = "document.querySelector('.line.look-1').getAttribute('d').length"
    before = page.evaluate(length)
    page.get_by_label("5 min", exact=True).check()
    until(lambda: page.evaluate(length) < before, "a shorter line")
    page.get_by_label("1 h", exact=True).check()
    until(lambda: page.evaluate(length) > before, "a longer line")
    visit.close()
