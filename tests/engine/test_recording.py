"""Recordings: bounded, private, without text, and never in the way of an answer."""

from __future__ import annotations

import os
import stat
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from engine.clock import ManualClock
from engine.errors import EngineError
from engine.recording import CHUNK_TOKENS, LEAST_MAX_BYTES, Exchange, TrafficRecorder, chunk_names
from envs.workload.loaders import load_trace
from envs.workload.prefixes import shared_fraction

IDS = list(range(1000, 1100))


def exchange(arrival_ns: int = 0, prompt: list[int] | bytes = IDS, space: str = "", output: int = 7) -> Exchange:
    return Exchange(arrival_ns, len(prompt), output, prompt, "stop", space)


def names_of(path: Path) -> list[list[str]]:
    return [line.rsplit(",", 1)[1].split() for line in path.read_text().splitlines()[1:]]


@given(st.lists(st.integers(0, 50), max_size=80), st.lists(st.integers(0, 50), max_size=80))
def test_names_agree_exactly_as_far_as_whole_chunks_do(one: list[int], two: list[int]) -> None:
    key = bytes(32)
    first, second = chunk_names(one, key), chunk_names(two, key)
    assert len(first) == len(one) // CHUNK_TOKENS
    for chunks in range(1, min(len(first), len(second)) + 1):
        same = one[: chunks * CHUNK_TOKENS] == two[: chunks * CHUNK_TOKENS]
        assert (first[chunks - 1] == second[chunks - 1]) == same
    assert not set(first) & set(chunk_names(one, bytes([1]) * 32))
    assert not set(first) & set(chunk_names(one, key, "another space"))


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    clock = ManualClock(start_ns=5_000_000_000)
    recorder = TrafficRecorder(tmp_path / "r.csv", clock)
    clock.set_wall_s(9e9)  # the wall clock jumps: gaps do not
    recorder.record(exchange(7_000_000_000, IDS[:48]))
    recorder.record(exchange(5_500_000_000, IDS[:40]))
    recorder.record(exchange(8_000_000_000, IDS[:40], space="salt"))
    recorder.close()
    times = [float(line.split(",")[0]) for line in (tmp_path / "r.csv").read_text().splitlines()[1:]]
    assert times == pytest.approx([1_700_000_002, 1_700_000_000.5, 1_700_000_003], abs=1e-5)  # time of day at the start
    trace = load_trace(tmp_path / "r.csv")
    assert [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in trace.requests] == [
        (0.0, 40, 7),
        (pytest.approx(1.5, abs=1e-5), 48, 7),
        (pytest.approx(2.5, abs=1e-5), 40, 7),
    ]
    assert trace.block_tokens == 16
    assert shared_fraction(trace) == pytest.approx(32 / 128)


def test_nothing_of_a_prompt_can_be_found_in_the_file(tmp_path: Path) -> None:
    text = b"my password is swordfish, and nobody may read this line anywhere at all"
    ids = [token_id + 70_000 for token_id in range(64)]
    path = tmp_path / "r.csv"
    recorder = TrafficRecorder(path, ManualClock(), of_text=True)
    recorder.record(exchange(prompt=text))
    recorder.record(exchange(prompt=ids, space="customer 17"))
    recorder.close()
    content = path.read_bytes()
    assert b"swordfish" not in content
    assert b"customer" not in content
    assert not any(str(token_id).encode() in content.replace(b",", b" ").split() for token_id in ids)
    assert array("I", ids).tobytes() not in content
    # The key is nowhere: the same prompt has other names in the next file.
    again = TrafficRecorder(tmp_path / "again.csv", ManualClock(), of_text=True)
    again.record(exchange(prompt=text))
    again.close()
    assert names_of(path)[0] != names_of(tmp_path / "again.csv")[0]
    assert recorder._key not in content


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        recorder = TrafficRecorder(tmp_path / "r.csv", ManualClock())
    finally:
        os.umask(before)
    recorder.close()
    assert stat.S_IMODE((tmp_path / "r.csv").stat().st_mode) == 0o600


def test_a_full_file_is_rotated_and_both_are_traces(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    recorder = TrafficRecorder(path, ManualClock(), max_bytes=LEAST_MAX_BYTES)
    for number in range(3000):
        recorder.record(exchange(number * 1_000_000))
        if number % 500 == 0:
            until(recorder._queue.empty, "the recorder to write")  # the queue is bounded; a test must not fill it
    recorder.close()
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["r.csv", "r.csv.1"]
    assert all(file.stat().st_size <= LEAST_MAX_BYTES for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    older, newer = load_trace(files[1]), load_trace(files[0])
    assert len(older.requests) > 100
    assert not {i for r in older.requests for i in r.hash_ids} & {i for r in newer.requests for i in r.hash_ids}
    assert recorder.dropped == 0


def test_an_earlier_recording_is_kept_and_another_file_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "r.csv"
    for _ in range(2):
        recorder = TrafficRecorder(path, ManualClock())
        recorder.record(exchange())
        recorder.close()
    assert len(load_trace(path.with_name("r.csv.1")).requests) == len(load_trace(path).requests) == 1
    other = tmp_path / "thesis.txt"
    other.write_text("years of work\n")
    with pytest.raises(EngineError, match="exists and is no recording"):
        TrafficRecorder(other, ManualClock())
    assert other.read_text() == "years of work\n"
    (tmp_path / "link.csv").symlink_to(path)
    with pytest.raises(EngineError, match="no plain file"):
        TrafficRecorder(tmp_path / "link.csv", ManualClock())
    with pytest.raises(EngineError, match="No such file"):
        TrafficRecorder(tmp_path / "none" / "r.csv", ManualClock())
    with pytest.raises(EngineError, match="room for at least"):
        TrafficRecorder(path, ManualClock(), max_bytes=10)


def test_two_processes_cannot_record_to_one_file(tmp_path: Path) -> None:
    recorder = TrafficRecorder(tmp_path / "r.csv", ManualClock())
    with pytest.raises(EngineError, match="another process is recording"):
        TrafficRecorder(tmp_path / "r.csv", ManualClock())
    recorder.close()
    recorder.close()


def test_a_full_disk_stops_the_recording_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = TrafficRecorder(tmp_path / "r.csv", ManualClock())

    def full(_fd: int, _data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    recorder.record(exchange())
    until(lambda: recorder._failed, "the recorder to give up")
    recorder.record(exchange())
    recorder.close()
    assert recorder.dropped == 2
    assert [record.message for record in caplog.records if "recording stops" in record.message] == [
        f"{tmp_path / 'r.csv'}: recording stops: No space left on device"
    ]


def test_a_slow_disk_costs_rows_and_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import threading

    recorder = TrafficRecorder(tmp_path / "r.csv", ManualClock())
    go_on = threading.Event()
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: (go_on.wait(30), write(fd, data))[1])
    for _ in range(6000):
        recorder.record(exchange(prompt=IDS[:16]))
    assert 6000 - 4096 - 512 <= recorder.dropped <= 6000 - 4096
    go_on.set()
    recorder.close()
    assert len(load_trace(tmp_path / "r.csv").requests) == 6000 - recorder.dropped
