"""Lengths of a load: read from a trace where there is one, and stated where there is none."""

from __future__ import annotations

import gzip
import random
from pathlib import Path
from statistics import median

import pytest

from engine.cache_bench.lengths import OUTPUT_MEDIAN, PROMPT_MEDIAN, load_lengths


def test_a_chat_trace_is_preferred_and_read_around_its_end(tmp_path: Path) -> None:
    (tmp_path / "a_code.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,5,5\n")
    (tmp_path / "conv_rate.csv").write_text("time,rate\n0,3\n")
    with gzip.open(tmp_path / "my_conv.csv.gz", "wt") as stream:
        stream.write("TIMESTAMP,ContextTokens,GeneratedTokens\nx,10,1\nx,20,2\nx,30,3\n")
    found = load_lengths(tmp_path, 4, random.Random(1), longest=100)
    assert found.source.startswith("my_conv.csv.gz from row ")
    assert found.pairs[0] == found.pairs[3]
    assert sorted(found.pairs[:3]) == [(10, 1), (20, 2), (30, 3)]


@pytest.mark.parametrize("empty", [True, False])
def test_without_a_trace_the_distributions_are_those_that_are_stated(tmp_path: Path, empty: bool) -> None:
    found = load_lengths(tmp_path if empty else None, 4000, random.Random(2), longest=100_000)
    assert f"median {PROMPT_MEDIAN}, sigma 0.6" in found.source
    assert median(prompt for prompt, _ in found.pairs) == pytest.approx(PROMPT_MEDIAN, rel=0.05)
    assert median(output for _, output in found.pairs) == pytest.approx(OUTPUT_MEDIAN, rel=0.05)


def test_lengths_are_divided_and_cut_to_what_a_model_takes(tmp_path: Path) -> None:
    (tmp_path / "conv.csv").write_text("prompt_tokens,output_tokens\n4000,80\n")
    found = load_lengths(tmp_path, 1, random.Random(0), longest=500, divide_by=4)
    assert found.pairs == ((480, 20),)
    assert found.source.endswith("divided by 4")
    assert load_lengths(tmp_path, 1, random.Random(0), longest=50).pairs == ((1, 49),)
