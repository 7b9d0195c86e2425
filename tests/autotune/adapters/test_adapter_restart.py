"""One change by a restart: drained first, verified after, taken back if it did not take effect; and the file of it."""

from __future__ import annotations

import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from autotune.adapters.base import Flag
from autotune.adapters.find import adapter_of
from autotune.adapters.http_engine import HttpEngine
from autotune.adapters.restart import Restarter
from autotune.adapters.restart_file import FileRefused, put, read_own, render, values_in
from autotune.adapters.restart_work import Outcome, Phase, RestartPlan, Work
from autotune.adapters.web import Web
from engine.clock import ManualClock
from envs.port import Change

FP8 = [Change("kv-cache-dtype", "fp8")]
AUTO = {"kv-cache-dtype": "auto", "block-size": 16}


@dataclass
class Manager:
    """A service manager: its command ends after ``polls`` polls; the server is then another, with what the file says.

    ``obeys`` False: the unit does not read the file. ``code``: how commands end. ``comes_back``: how often the server
    does.
    """

    server: Any
    file: Path
    polls: int = 2
    obeys: bool = True
    code: int = 0
    comes_back: int = 10
    commands: list[tuple[str, ...]] = field(default_factory=list)
    files: list[str | None] = field(default_factory=list)
    killed: int = 0

    def spawn(self, command: Sequence[str]) -> Manager:
        self.commands.append(tuple(command))
        self.files.append(self.file.read_text() if self.file.exists() else None)
        self.left = self.polls
        return self

    def poll(self) -> int | None:
        self.left -= 1
        if self.left > 0:
            return None
        if self.code == 0:
            wanted = {"kv-cache-dtype": "auto", **(values_in(self.files[-1]) if self.obeys else {})}
            self.server.restart(**wanted)
            self.comes_back -= 1
            self.server.alive = self.comes_back >= 0
        return self.code

    def kill(self) -> None:
        self.killed += 1


@dataclass
class Bench:
    """A restarter over a fake vLLM, its manager and a clock."""

    server: Any
    engine: HttpEngine
    manager: Manager
    restarter: Restarter
    clock: ManualClock

    def begin(self) -> Work:
        return self.restarter.begin(FP8, AUTO, 7, self.clock.now_ns())

    def finish(self, work: Work, each: Callable[[Work], None] | None = None) -> tuple[Outcome, list[Phase]]:
        """Tick by tick to the end; the phases on the way."""
        phases = [work.phase]
        for _ in range(2000):
            self.clock.advance_s(1)
            if each is not None:
                each(work)
            result = self.restarter.advance(work, self.clock.now_ns())
            if isinstance(result, Outcome):
                return result, phases
            work = result
            if work.phase is not phases[-1]:
                phases.append(work.phase)
        raise AssertionError(f"it never ended: {work}")


@pytest.fixture
def bench(fake_engines: Any, tmp_path: Path) -> Iterator[Bench]:
    with fake_engines.FakeServer("vllm", AUTO) as server:
        clock = ManualClock(start_ns=10**9)
        engine = adapter_of("vllm", server.url, clock)
        file = tmp_path / "engine.env"
        plan = RestartPlan(file, "environment", (("systemctl", "daemon-reload"), ("systemctl", "restart", "vllm")))
        manager = Manager(server, file)
        yield Bench(server, engine, manager, Restarter(engine, plan, manager.spawn), clock)


def test_it_drains_writes_restarts_and_verifies(bench: Bench) -> None:
    bench.server.figures.running, bench.server.figures.waiting = 3, 1

    def fade(work: Work) -> None:
        if work.phase is Phase.DRAINING:
            assert not bench.manager.commands
            assert not bench.manager.file.exists()
            one = bench.server.figures
            one.waiting = 0
            one.running = max(0, one.running - 1)

    outcome, phases = bench.finish(bench.begin(), fade)
    assert outcome.kind == "applied", outcome
    assert phases == [Phase.DRAINING, Phase.RESTARTING, Phase.STARTING]
    assert bench.manager.commands == [("systemctl", "daemon-reload"), ("systemctl", "restart", "vllm")]
    assert "AUTOTUNE_ENGINE_ARGS=--kv-cache-dtype fp8\n" in bench.manager.file.read_text()
    assert bench.server.knobs["kv-cache-dtype"] == "fp8"
    assert outcome.without_service_s is not None
    assert 1 <= outcome.without_service_s <= 10


def test_requests_that_come_between_draining_and_the_command_are_waited_for(bench: Bench) -> None:
    came = []

    def come(work: Work) -> None:
        one = bench.server.figures
        if work.phase is Phase.RESTARTING and not came and not bench.manager.commands:
            one.running = 2
            came.append(1)
        elif work.phase is Phase.DRAINING:
            assert not bench.manager.commands
            one.running = 0

    outcome, phases = bench.finish(bench.begin(), come)
    assert outcome.kind == "applied"
    assert phases == [Phase.DRAINING, Phase.RESTARTING, Phase.DRAINING, Phase.RESTARTING, Phase.STARTING]


def test_an_engine_that_is_never_idle_is_left_alone(bench: Bench) -> None:
    bench.server.figures.running = 1
    outcome, phases = bench.finish(bench.begin())
    assert (outcome.kind, phases) == ("not_drained", [Phase.DRAINING])
    assert "1 running and 0 waiting after 300 s; nothing was touched" in outcome.why
    assert not bench.manager.commands
    assert not bench.manager.file.exists()
    assert not bench.server.posts, "it was not asked to pause"


def test_an_engine_that_goes_away_while_it_drains_is_left_alone(bench: Bench) -> None:
    work = bench.begin()
    bench.server.alive = False
    outcome, _ = bench.finish(work)
    assert outcome.kind == "not_drained"
    assert not bench.manager.commands


def test_its_own_pause_is_used_where_that_is_wanted_and_what_it_held_is_counted(bench: Bench) -> None:
    bench.restarter.plan = RestartPlan(bench.manager.file, "environment", (("restart",),), drain="pause")
    bench.server.figures.running, bench.server.figures.waiting = 1, 2
    work = bench.begin()
    assert work.is_paused

    def fade(_: Work) -> None:
        bench.server.figures.running = 0

    outcome, _ = bench.finish(work, fade)
    assert (outcome.kind, outcome.held) == ("applied", 2)
    assert any(path.startswith("/pause?mode=wait") for path in bench.server.posts)


def test_a_pause_is_taken_back_when_nothing_comes_of_it(bench: Bench) -> None:
    bench.restarter.plan = RestartPlan(bench.manager.file, "environment", (("restart",),), drain="pause", drain_s=5)
    bench.server.figures.running = 1
    outcome, _ = bench.finish(bench.begin())
    assert outcome.kind == "not_drained"
    assert bench.server.posts[-1] == "/resume"
    again = bench.begin()
    assert bench.restarter.abandon(again, "no") is not None
    assert bench.server.posts[-1] == "/resume"


def test_what_did_not_take_effect_is_taken_back(bench: Bench) -> None:
    bench.manager.obeys = False
    put(bench.manager.file, render("environment", {Flag("--block-size"): "16"}, {"block-size": 16}))
    before = bench.manager.file.read_text()
    outcome, phases = bench.finish(bench.begin())
    assert outcome.kind == "rolled_back", outcome
    assert "came back with kv-cache-dtype=auto" in outcome.why
    assert phases[2:] == [Phase.STARTING, Phase.RESTORING], "it runs as before already: no second restart"
    assert bench.manager.file.read_text() == before
    assert "--block-size 16 --kv-cache-dtype fp8" in (bench.manager.files[0] or ""), "earlier settings stay"
    assert len(bench.manager.commands) == 2
    assert outcome.without_service_s is not None
    assert outcome.without_service_s < 10, "it served again while it was looked at"


def test_an_engine_that_does_not_start_with_it_is_brought_back_as_before(bench: Bench) -> None:
    bench.manager.comes_back = 1  # after daemon-reload of the fake, which restarts as well

    def mend(work: Work) -> None:
        if work.phase is Phase.RESTORING:
            bench.manager.comes_back = 10

    outcome, phases = bench.finish(bench.begin(), mend)
    assert outcome.kind == "rolled_back"
    assert "not healthy 600 s after the restart" in outcome.why
    assert phases[-1] is Phase.RETURNING
    assert not bench.manager.file.exists()


def test_one_that_does_not_come_back_at_all_is_for_people(bench: Bench) -> None:
    bench.manager.comes_back = 1
    outcome, _ = bench.finish(bench.begin())
    assert outcome.kind == "failed"
    assert "as before it does not come back either" in outcome.why
    assert len(bench.manager.commands) == 4, "one restart, one back, no more"


def test_a_command_that_fails_is_taken_back(bench: Bench) -> None:
    bench.manager.code = 5
    outcome, _ = bench.finish(bench.begin())
    assert outcome.kind == "rolled_back"
    assert "systemctl daemon-reload ended with 5" in outcome.why
    assert len(bench.manager.commands) == 1, "the engine has not been touched by it"
    assert not bench.manager.file.exists()


def test_a_command_that_hangs_is_killed(bench: Bench) -> None:
    bench.manager.polls = 10_000
    outcome, _ = bench.finish(bench.begin())
    assert outcome.kind == "rolled_back"
    assert bench.manager.killed == 1


def test_a_command_that_fails_and_takes_the_engine_with_it_is_run_again(bench: Bench) -> None:
    bench.manager.code = 5

    def mend(work: Work) -> None:
        bench.server.alive = work.phase in {Phase.DRAINING, Phase.RETURNING} or not bench.manager.commands
        bench.manager.code = 0 if work.phase is Phase.RESTORING else bench.manager.code

    outcome, phases = bench.finish(bench.begin(), mend)
    assert outcome.kind == "rolled_back"
    assert phases[-2:] == [Phase.RESTORING, Phase.RETURNING]
    assert len(bench.manager.commands) == 3


def test_a_command_that_is_not_there_is_said(bench: Bench) -> None:
    def missing(_: Sequence[str]) -> Any:
        raise FileNotFoundError(2, "No such file or directory")

    bench.restarter.spawn = missing
    outcome, _ = bench.finish(bench.begin())
    assert outcome.kind == "rolled_back"
    assert "No such file" in outcome.why
    assert not bench.manager.file.exists()


@pytest.mark.parametrize("phase", ["restarting", "starting", "restoring", "returning"])
def test_a_daemon_that_was_killed_in_between_goes_on(bench: Bench, phase: str) -> None:
    """The state is what the journal holds; the commands that ran are over."""
    work, seen = bench.begin(), {}

    def note(now: Work) -> None:
        seen.setdefault(str(now.phase), now)
        if now.phase is Phase.RESTORING:
            bench.manager.comes_back = 10

    is_mended = phase in {"restarting", "starting"}
    bench.manager.comes_back = 10 if is_mended else 1
    bench.finish(work, note)
    found = Work.resumed(seen[phase].to_json(), bench.clock.now_ns())
    fresh = Restarter(bench.engine, bench.restarter.plan, bench.manager.spawn)
    bench.restarter = fresh
    outcome, _ = bench.finish(found)
    assert outcome.kind == ("applied" if is_mended else "rolled_back")


def test_the_file_of_somebody_else_is_never_touched(bench: Bench, tmp_path: Path) -> None:
    bench.manager.file.write_text("VLLM_ARGS=mine\n")
    with pytest.raises(FileRefused, match="somebody else has written it"):
        bench.begin()
    bench.manager.file.unlink()
    target = tmp_path / "target"
    target.write_text("x")
    bench.manager.file.symlink_to(target)
    with pytest.raises(FileRefused, match="not a file of the daemon's"):
        bench.begin()
    assert target.read_text() == "x"


def test_a_folder_that_cannot_be_written_restarts_nothing(bench: Bench, tmp_path: Path) -> None:
    plan = RestartPlan(tmp_path / "missing" / "engine.env", "environment", (("restart",),))
    bench.restarter.plan = plan
    outcome, _ = bench.finish(bench.begin())
    assert outcome.kind == "refused"
    assert "nothing was restarted" in outcome.why
    assert not bench.manager.commands


def test_the_file_is_whole_and_readable_and_gone_when_it_was_not_there(tmp_path: Path) -> None:
    file = tmp_path / "a.conf"
    flags = {Flag("--cache-type-k", "LLAMA_ARG_CACHE_TYPE_K"): "q8_0"}
    text = render("drop_in", flags, {"cache-type-k": "q8_0"})
    put(file, text)
    assert file.read_text() == text
    assert '[Service]\nEnvironment="AUTOTUNE_ENGINE_ARGS=--cache-type-k q8_0"\n' in text
    assert 'Environment="LLAMA_ARG_CACHE_TYPE_K=q8_0"\n' in text
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    assert read_own(file) == text
    assert values_in(text) == {"cache-type-k": "q8_0"}
    assert [path.name for path in tmp_path.iterdir()] == ["a.conf"]
    put(file, None)
    assert read_own(file) is None
    assert values_in("# values: not json\n") == {}


def test_a_pause_on_its_way_never_comes_after_its_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pause is asked for by a thread of its own: one that is late must not leave the engine paused for good."""
    begun, came = threading.Event(), list[str]()
    post = Web.post

    def late(web: Web, path: str) -> bool:
        if "pause" in path:
            begun.wait(10)
        came.append(path)
        return post(web, path)

    monkeypatch.setattr(Web, "post", late)
    assert bench.engine.pause()
    ending = threading.Thread(target=bench.engine.resume)
    ending.start()
    begun.set()
    ending.join(10)
    assert [path.split("?")[0] for path in came] == ["/pause", "/resume"]
