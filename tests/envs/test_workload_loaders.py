"""Trace files: every public form, gzip or not, and one-line errors that name file and line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from envs.workload.forms import chosen
from envs.workload.loaders import load_trace
from envs.workload.trace import TraceError, TraceRequest

PLAIN = "arrival_s,prompt_tokens,output_tokens\n0,374,44\n4.314579,396,109\n"
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n"
)
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n"
    "2024-05-10 00:00:00.009930+00:00,374,44\n2024-05-10 02:00:04.324509+02:00,396,109\n"
)
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,ChatGPT,374,44,418,Conversation log\n9.314579,GPT-4,396,109,505,API log\n"
)
MOONCAKE = (
    '{"timestamp": 1000, "input_length": 374, "output_length": 44, "hash_ids": [0, 1]}\n\n'
    '{"timestamp": 5314.579, "input_length": 396, "output_length": 109, "hash_ids": [0, 2]}\n'
)


def write(folder: Path, text: str, name: str = "trace.csv") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "text", [PLAIN, AZURE, AZURE_2024, BURST, MOONCAKE], ids=["plain", "azure", "2024", "burst", "moon"]
)
@pytest.mark.parametrize("packed", [False, True])
def test_every_form_gives_the_same_requests(tmp_path: Path, text: str, packed: bool) -> None:
    path = tmp_path / "trace.whatever"
    path.write_bytes(gzip.compress(text.encode()) if packed else text.encode())
    trace = load_trace(path)
    assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(374, 44), (396, 109)]
    assert [r.arrival_s for r in trace.requests] == pytest.approx([0.0, 4.314579], abs=1e-6)


def test_hash_ids_and_their_block_sizes(tmp_path: Path) -> None:
    mooncake = load_trace(write(tmp_path, MOONCAKE, "m.jsonl"))
    assert (mooncake.block_tokens, mooncake.requests[1].hash_ids) == (512, (0, 2))
    header = "arrival_s,prompt_tokens_est,output_tokens_est,session,hash_ids_b256bytes\n"
    agents = load_trace(write(tmp_path, header + "1,10,2,abc,7 8 9\n"))
    assert (agents.block_tokens, agents.requests) == (64, (TraceRequest(0.0, 10, 2, (7, 8, 9), "abc"),))
    assert (
        load_trace(write(tmp_path, "arrival_s,prompt_tokens,output_tokens,hash_ids_b16\n0,1,1,\n")).block_tokens == 16
    )


def test_rows_out_of_order_are_sorted_and_it_is_said(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n9,1,1\n7,2,2\n8,3,3\n"))
    assert [(r.arrival_s, r.prompt_tokens) for r in trace.requests] == [(0, 2), (1, 3), (2, 1)]
    assert trace.notes == ("1 rows were out of order of arrival: sorted",)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("1,abc,5", "expected a number of tokens in 'prompt_tokens', got 'abc'"),
        ("1,5,", "expected a number of tokens in 'output_tokens', got ''"),
        ("1,-5,5", "expected a number of tokens in 'prompt_tokens', got '-5'"),
        ("1,2.5,5", "expected a number of tokens in 'prompt_tokens', got '2.5'"),
        ("1,1e30,5", "expected a number of tokens in 'prompt_tokens', got '1e30'"),
        ("nan,5,5", "expected seconds in 'arrival_s', got 'nan'"),
        ("inf,5,5", "expected seconds in 'arrival_s', got 'inf'"),
        ("1e300,5,5", "expected seconds in 'arrival_s', got '1e300'"),
        ("1,5", "expected 3 columns as in the header, got 2"),
        ("1,5,5,5", "expected 3 columns as in the header, got 4"),
    ],
)
def test_a_broken_line_is_named(tmp_path: Path, line: str, expected: str) -> None:
    path = write(tmp_path, PLAIN + line + "\n6,7,8\n")
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value) == f"trace.csv:4: {expected}"
    skipping = load_trace(path, skip_bad_lines=True)
    assert skipping.skipped_lines == 1
    assert len(skipping.requests) == 3
    assert skipping.notes[0].startswith("1 broken lines skipped, the first: trace.csv:4: expected")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{broken", "expected one JSON object on the line"),
        ("[1, 2]", "expected a JSON object, got list"),
        ('{"timestamp": 1, "input_length": 1, "Input_Length ": 2}', "('input_length' is there twice)"),
        ('{"timestamp": 1, "input_length": true, "output_length": 1, "hash_ids": []}', "in 'input_length', got True"),
        ('{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [1.5]}', "whole numbers in 'hash_ids'"),
        (
            '{"timestamp": 1, "input_length": 1, "output_length": 1}',
            "expected whole numbers in 'hash_ids', got nothing",
        ),
        ('{"timestamp": null, "input_length": 1, "output_length": 1, "hash_ids": []}', "milliseconds in 'timestamp'"),
    ],
)
def test_a_broken_json_line_is_named(tmp_path: Path, line: str, expected: str) -> None:
    path = write(tmp_path, MOONCAKE + line + "\n", "m.jsonl")
    with pytest.raises(TraceError) as caught:
        load_trace(path)
    assert str(caught.value).startswith("m.jsonl:4: ")
    assert expected in str(caught.value)
    assert load_trace(path, skip_bad_lines=True).skipped_lines == 1


def test_a_broken_first_json_line_can_be_skipped(tmp_path: Path) -> None:
    path = write(tmp_path, '{"timestamp": 3}\n' + MOONCAKE, "m.jsonl")
    with pytest.raises(TraceError, match=r"m\.jsonl:1: columns not recognised"):
        load_trace(path)
    assert load_trace(path, skip_bad_lines=True).skipped_lines == 1


def test_zero_lengths_become_one_token(tmp_path: Path) -> None:
    trace = load_trace(write(tmp_path, "arrival_s,prompt_tokens,output_tokens\n0,0,0\n"))
    assert trace.requests == (TraceRequest(0.0, 1, 1),)


@pytest.mark.parametrize("text", ["", "\n\n", "arrival_s,prompt_tokens,output_tokens\n"])
def test_an_empty_trace_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(TraceError, match="no requests in it"):
        load_trace(write(tmp_path, text))


def test_unknown_columns_list_the_known_forms(tmp_path: Path) -> None:
    with pytest.raises(
        TraceError, match=r"trace.csv:1: columns not recognised \(rps, t_s\); expected one of: TIMESTAMP"
    ):
        load_trace(write(tmp_path, "t_s,rps\n1,2\n"), skip_bad_lines=True)


@pytest.mark.parametrize("skip", [False, True])
def test_two_columns_of_one_name_are_refused(tmp_path: Path, skip: bool) -> None:
    path = write(tmp_path, "arrival_s,prompt_tokens,output_tokens, Prompt_Tokens\n0,1,2,3\n")
    expected = "trace.csv:1: two columns are called 'prompt_tokens'; rename one, as only one can be read"
    with pytest.raises(TraceError) as caught:
        load_trace(path, skip_bad_lines=skip)
    assert str(caught.value) == expected
    form = chosen({"prompt": "prompt_tokens", "output": "output_tokens"})
    with pytest.raises(TraceError, match="two columns"):
        load_trace(path, form=form, rate_rps=1.0)
    nameless = write(tmp_path, "arrival_s,prompt_tokens,output_tokens,,\n0,1,2,,\n")
    assert load_trace(nameless).requests == (TraceRequest(0.0, 1, 2),)


def test_a_header_that_is_none_is_one_line(tmp_path: Path) -> None:
    """A file of one endless line, say."""
    with pytest.raises(TraceError, match=r"trace\.csv:1: expected the names of columns"):
        load_trace(write(tmp_path, "a" * 200_000))


def test_unreadable_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        load_trace(tmp_path / "missing.csv")
    cut = tmp_path / "cut.csv.gz"
    cut.write_bytes(gzip.compress((PLAIN * 50).encode())[:60])
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(cut)
    binary = tmp_path / "binary.csv"
    binary.write_bytes(PLAIN.encode() + b"\xff\xfe\x00,1,2\n")
    with pytest.raises(TraceError, match="cannot be read"):
        load_trace(binary)


def test_lengths_alone_need_a_rate(tmp_path: Path) -> None:
    path = write(tmp_path, "prompt_tokens,output_tokens\n" + "74,918\n" * 200)
    with pytest.raises(TraceError, match="no arrival times; give a rate"):
        load_trace(path)
    trace = load_trace(path, rate_rps=5.0, seed=3)
    assert len(trace.requests) == 200
    assert 200 / trace.duration_s == pytest.approx(5.0, rel=0.25)
    assert "Poisson arrivals at 5 requests/s" in trace.notes[0]
