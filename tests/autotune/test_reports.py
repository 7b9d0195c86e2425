"""Reports of simulations are readable: units, nothing cut off, tables that stay on the page, who keeps no budget."""

from __future__ import annotations

import re
from html import unescape

import pytest

from autotune.simulation.bars import Bar, bar_chart
from autotune.simulation.charts import WIDTH, Line, line_chart, stacked_chart
from autotune.simulation.report import Setting, budget_note, html_report
from autotune.simulation.units import label, number, seconds, size, span
from envs.signals import Targets
from policies.play import Move, Played, Row

SETTING = Setting("t.csv", "a profile", is_estimated=False, targets=Targets(1.25, 0.1), seed=0, interval_s=1.0)
LETTER = 6.2  # pixels at the figures' size of letters, for a broad guess


def played(name: str, *, budgeted: bool = True) -> Played:
    rows = [Row(3600.0 * n, 1.0, 12_345, 3, 1.0, {"native": 1_400_000_000}, 1200.0, 0.2, 1.0) for n in range(1, 25)]
    moves = [Move(3600.0, "kv_format=int8", "calm")]
    return Played(name, rows=rows, moves=moves, pool_bytes=5_600_000_000, budgeted=budgeted)


def texts(figure: str) -> list[tuple[float, str, str]]:
    found = re.findall(r'<text x="([\d.]+)" [^>]*text-anchor="(\w+)"[^>]*>([^<]*)</text>', figure)
    return [(float(x), anchor, unescape(text)) for x, anchor, text in found]


def assert_inside(figure: str) -> None:
    for x, anchor, text in texts(figure):
        wide = LETTER * len(text)
        left = x - {"start": 0.0, "middle": wide / 2, "end": wide}[anchor]
        assert left >= 0, text
        assert left + wide <= WIDTH + 1, text


def test_figures_have_units_and_no_powers_of_ten() -> None:
    assert [size(n) for n in (0, 512, 1.4e9, 999.7e6, 2.5e13)] == ["0 B", "512 B", "1.4 GB", "1 GB", "25 TB"]
    assert [seconds(s) for s in (None, 0.0, 2e-6, 0.0125, 0.9997, 1234.5, 9000.0)] == [
        "-", "0 s", "2 us", "12.5 ms", "1 s", "1,234 s", "2.5 h",
    ]  # fmt: skip
    assert [number(n) for n in (0.125, 12.5, 99.99, 1e3, 1234567.0)] == ["0.125", "12.5", "100", "1,000", "1,234,567"]
    assert [span(end / 2, end) for end in (600.0, 3600.0, 86_400.0, 604_800.0)] == ["300 s", "30 min", "12 h", "3.5 d"]
    assert (label(1.5, "x"), label(1500.0, ""), label(1.4e9, "B")) == ("1.5 x", "1,500", "1.4 GB")


@pytest.mark.parametrize("end_s", [60.0, 1e5, 1e7])
def test_nothing_of_a_figure_is_cut_off(end_s: float) -> None:
    times = [0.0, end_s]
    for figure in (
        line_chart(times, [Line("a", [1e5, 1.2e6])], "s"),
        line_chart([0.5, 2.0], [Line("a", [0.0, 0.0])], "", along="x"),
        line_chart(times, [Line("a", [0.001, 1e6])], "", log=True),
        stacked_chart(times, [Line("native", [0.0, 123.4e9])], "B"),
        bar_chart([Bar("static:" + ",".join(f"knob_number_{n}=value" for n in range(9)), 12_345.6)]),
    ):
        assert texts(figure)
        assert_inside(figure)
        assert "e+" not in figure
        assert "e-" not in "".join(text for _, _, text in texts(figure))


def test_a_label_that_is_shortened_is_told_whole_on_hover() -> None:
    name = "static:" + ",".join(f"knob_{n}=value" for n in range(9))
    assert f"<title>{name}</title>" in bar_chart([Bar(name, 1.0)])


def test_what_is_along_a_figure_is_no_time_where_it_is_a_rate() -> None:
    along = [text for _, anchor, text in texts(line_chart([0.5, 1.5], [Line("a", [1.0, 2.0])], "", along="x"))]
    assert {"0.5 x", "1 x", "1.5 x"} <= set(along)


def test_a_report_is_readable() -> None:
    text = html_report([played("default"), played("literature", budgeted=False)], SETTING)
    assert "4.28 GB" in text
    assert " MB" not in text
    assert "12.5 h" in text
    assert "e+0" not in text
    assert text.count("<table") == text.count('<div class="wide"><table') == 3
    assert "first token 1.25 s, 95% of a request&#x27;s gaps 100 ms" in text
    for figure in text.split("<svg")[1:]:
        assert_inside(figure.split("</svg>")[0])


def test_who_is_held_to_no_budget_is_marked_everywhere() -> None:
    free = [played("default"), played("literature", budgeted=False)]
    text = html_report(free, SETTING)
    assert text.count("literature") == text.count("literature (no budget)") >= 4
    assert "default (no budget)" not in text
    note = budget_note(free)
    assert note is not None
    assert note[1:] in text
    assert budget_note(free[:1]) is None
    assert "no budget" not in html_report(free[:1], SETTING)
