"""Envelope files, and tables whose columns a person names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from envs.workload.envelopes import load_envelope
from envs.workload.forms import chosen
from envs.workload.loaders import load_trace
from envs.workload.trace import TraceError


def write(folder: Path, text: str, name: str = "e.csv") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_digitised_rate_is_read_and_lost_zeros_are_put_back(tmp_path: Path) -> None:
    text = "t_s,rps_lo,rps_mid,rps_hi\n866,1,2,3\n1300,1,4,5\n173,1,6,7\n2164,1,8,9\n26,1,10,11\n"
    loaded = load_envelope(write(tmp_path, text))
    assert loaded.envelope.edges_s == pytest.approx((0, 434, 864, 1298, 1734, 2168), abs=1)
    assert loaded.envelope.rates_rps == (2, 4, 6, 8, 10)
    assert loaded.envelope.gap_cvs is None
    assert loaded.notes == ("2 of 5 times had lost trailing zeros: repaired",)


def test_windows_with_their_burstiness(tmp_path: Path) -> None:
    text = "t_s,rate_rps,active_clients,top_client_share,rate_weighted_cv\n0,212.78,43,0.4,2.1\n600,180,40,0.5,1.5\n"
    envelope = load_envelope(write(tmp_path, text)).envelope
    assert envelope.edges_s == (0, 600, 1200)
    assert envelope.gap_cvs == (2.1, 1.5)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time,rate\n1,2\n", r"e.csv:1: expected the columns t_s and rps or"),
        ("t_s,rps\n1,2\n", "two rows or more"),
        ("t_s,rps\n0,2\n10,3\n5,1\n20,2\n", "e.csv:4: expected a time after 10 s, got 5"),
        ("t_s,rps\n0,2\n10,x\n", "e.csv:3: expected a number in 'rps', got 'x'"),
        ("t_s,rps\n0,2\n10,-1\n", r"expected a rate from 0 to 1e\+06, got -1"),
        ("t_s,rps\n0,2\n10,1e300\n", r"expected a rate from 0 to 1e\+06, got 1e\+300"),
        ("t_s,rps\n0,0\n10,0\n", "every rate is 0"),
        ("t_s,rps,gap_cv\n0,2,1\n10,1,0\n", "coefficient of variation > 0"),
        ("t_s,rps\n0,2\n10\n", "e.csv:3: expected 2 columns"),
    ],
)
def test_a_broken_envelope_is_one_line(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(TraceError, match=words):
        load_envelope(write(tmp_path, text))
    with pytest.raises(TraceError, match="cannot be read"):
        load_envelope(tmp_path / "missing")


def test_named_columns_in_any_unit(tmp_path: Path) -> None:
    path = write(tmp_path, "when,who,In,out,x\n1500,ann,10,2,7 8\n500,bob,20,3,7\n", "own.csv")
    columns = {"arrival": "when", "prompt": "in", "output": "out", "source": "who", "hashes": "x"}
    trace = load_trace(path, form=chosen(columns, unit="ms", block_tokens=8))
    rows = [(r.arrival_s, r.prompt_tokens, r.output_tokens, r.source, r.hash_ids) for r in trace.requests]
    assert rows == [(0.0, 20, 3, "bob", (7,)), (1.0, 10, 2, "ann", (7, 8))]
    assert trace.block_tokens == 8
    dated = write(tmp_path, '{"ts": "2026-01-01T00:00:00Z", "p": 1, "o": 1}\n{"ts": 1767225601, "p": 1, "o": 1}\n', "j")
    form = chosen({"arrival": "ts", "prompt": "p", "output": "o"})
    assert [r.arrival_s for r in load_trace(dated, form=form).requests] == [0.0, 1.0]


@pytest.mark.parametrize(
    ("columns", "options", "words"),
    [
        ({"prompt": "p"}, {}, "which column holds the output tokens"),
        ({"prompt": "p", "output": "o", "when": "w"}, {}, "'when' is not a column that a trace has"),
        ({"prompt": "p", "output": "o"}, {"unit": "h"}, "no unit of time"),
        ({"prompt": "p", "output": "o", "hashes": "h"}, {}, "go together"),
        ({"prompt": "p", "output": "o", "hashes": "h"}, {"block_tokens": 1e300}, "blocks hold from 1 byte"),
        ({"prompt": "p", "output": "o", "hashes": "h"}, {"block_tokens": 1e-9}, "blocks hold from 1 byte"),
    ],
)
def test_wrong_columns_are_one_line(columns: dict[str, str], options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chosen(columns, **options)


def test_a_column_that_is_not_there_is_named_with_those_that_are(tmp_path: Path) -> None:
    path = write(tmp_path, "a,b\n1,2\n", "own.csv")
    with pytest.raises(TraceError, match=r"own.csv:1: no column 'c'; it has: a, b"):
        load_trace(path, form=chosen({"prompt": "a", "output": "c"}))


def test_sources_of_the_public_forms(tmp_path: Path) -> None:
    path = write(tmp_path, "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,GPT-4,1,1,2,x\n")
    assert load_trace(path).requests[0].source == "GPT-4"
    path = write(tmp_path, "arrival_s,prompt_tokens,output_tokens,client\n5,1,1,65\n")
    assert load_trace(path).requests[0].source == "65"


def test_estimated_lengths_are_said(tmp_path: Path) -> None:
    path = write(tmp_path, "arrival_s,prompt_tokens,output_tokens,estimated\n1,1,1,\n2,1,1,prompt\n")
    assert load_trace(path).notes == ("1 requests have estimated lengths",)
