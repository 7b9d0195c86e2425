"""``autotune profile``: mistakes are one line before anything is loaded, and there is something to be seen at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune import profiling
from autotune.cli import app
from autotune.cli._shared import fail_with
from engine.errors import EngineError
from envs.profile import FitError, read_profile

Command = Callable[..., tuple[int, str, str]]
MODEL = Path(profiling.__file__).parent.parent / "engine" / "bundled" / "model"
BUNDLED = Path(profiling.__file__).parent.parent / "envs" / "profiles" / "bundled_cpu.yaml"


@pytest.fixture
def autotune(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = fail_with(lambda: app(["profile", *arguments], standalone_mode=False))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def test_mistakes_are_one_line(autotune: Command, tmp_path: Path) -> None:
    out = str(tmp_path / "profile.yaml")
    for code, words, arguments in (
        (1, "model folder /nope does not exist", ["/nope", "-o", out]),
        (1, "model folder /nope does not exist", ["/nope", "-o", out, "--analytic", "H200"]),
        (1, "H200", [str(MODEL), "-o", out, "--analytic", "abacus"]),
        (2, "cannot be written; name a file", [str(MODEL), "-o", str(tmp_path)]),
        (2, "cannot be written; name a file", [str(MODEL), "-o", str(tmp_path / "none" / "x.yaml")]),
        (2, "--kv-pool-bytes", [str(MODEL), "-o", out, "--kv-pool-bytes", "1X"]),
        (2, "--threads", [str(MODEL), "-o", out, "--threads", "0"]),
        (2, "--threads", [str(MODEL), "-o", out, "--threads", "9" * 20]),
        (1, "device '' is not known", [str(MODEL), "-o", out, "--analytic", ""]),
        (2, "--duration", [str(MODEL), "-o", out, "--from-metrics", "http://127.0.0.1:1", "--duration", "nan"]),
        (2, "--every", [str(MODEL), "-o", out, "--from-metrics", "http://127.0.0.1:1", "--every", "1e-320"]),
        (1, "Invalid port", [str(MODEL), "-o", out, "--from-metrics", "http://[::1"]),
    ):
        result = autotune(*arguments)
        assert result[:2] == (code, ""), result
        assert len(result[2].splitlines()) == 1, result
        assert words in result[2]


def test_what_is_waited_for_is_said_before_the_wait(
    autotune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[str] = []

    def measure(*_: object, **__: object) -> None:
        seen.append(capsys.readouterr().err)
        raise EngineError("enough")

    monkeypatch.setattr(profiling, "measure", measure)
    assert autotune(str(MODEL), "-o", str(tmp_path / "p.yaml"))[0] == 1
    assert seen[0].replace("\n", "").endswith(f"loading {MODEL} ...")


def _pages(told: Callable[[int], tuple[float, float, float]]) -> list[str]:
    """Of an engine of ours: steps, decoded and prompt tokens, and seconds, ten steps a window."""
    pages, sums = [], [0.0, 0.0, 0.0, 0.0]
    for turn in range(25):
        decoded, prompts, seconds = told(turn)
        sums = [sums[0] + 10, sums[1] + 10 * decoded, sums[2] + 10 * prompts, sums[3] + 10 * seconds]
        names = ("steps", "decode_tokens_computed", "prefill_tokens_computed", "step_seconds")
        lines = [
            f"# TYPE autotune_engine_{n} counter\nautotune_engine_{n}_total {v}"
            for n, v in zip(names, sums, strict=True)
        ]
        pages.append("\n".join([*lines, ""]))
    return pages


def test_a_fit_to_metrics_says_where_it_begins_and_what_it_could_not_tell(
    autotune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "p.yaml"
    pages = _pages(lambda turn: (1.0 + turn % 7, 50.0, 0.02 + 0.002 * (turn % 7)))
    monkeypatch.setattr("autotune.cli.profile._pages", lambda *_: iter(pages))
    code, said, warned = autotune(str(MODEL), "-o", str(out), "--from-metrics", "http://x")
    assert code == 0
    assert warned.count("warning: ") == 1
    assert "H100's data sheet; name the device with --analytic" in warned
    code, said, warned = autotune(str(MODEL), "-o", str(out), "--from-metrics", "http://x", "--analytic", "L4")
    assert (code, warned) == (0, "")
    assert "prefill_token hardly varied" in said
    assert "all else is estimated from L4's data sheet" in said
    found = read_profile(out)
    assert found.device.name == "L4"
    told = [name for name, term in found.latency.terms.items() if not term.estimated]
    assert told == [name for name in found.latency.terms if name in {"step", "decode_sequence"}]
    assert found.latency.terms["token_beyond_knee"].seconds > 0, "prompts are not free"
    assert found.latency.steps is not None
    assert "ESTIMATED" in found.describe()


def test_a_poor_fit_is_said_when_it_is_made_and_wherever_it_is_used(
    autotune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, usual = tmp_path / "p.yaml", profiling.analytic(MODEL, "L4")
    for median, is_poor in ((0.41, True), (0.07, False)):
        latency = usual.latency.model_copy(update={"steps": FitError(samples=9, median=median, p90=0.9)})
        made = usual.model_copy(update={"latency": latency, "source": "measured"})
        monkeypatch.setattr(profiling, "measure", lambda *_, made=made, **__: made)
        code, _, warned = autotune(str(MODEL), "-o", str(out))
        assert code == 0
        lines = [line for line in warned.splitlines() if line.startswith("warning: ")]
        assert len(lines) == is_poor
        assert ("POOR FIT (steps off by 41%)" in read_profile(out).describe()) == is_poor
        if is_poor:
            assert "off by more than 41%" in lines[0]
            assert "measure again" in lines[0]
    assert not read_profile(BUNDLED).poor_fits


def test_a_page_that_is_none_is_one_line(autotune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autotune.cli.profile._pages", lambda *_: iter(["{'a': 1} x y z"] * 9))
    code, _, said = autotune(str(MODEL), "-o", str(tmp_path / "p"), "--from-metrics", "http://x", "--analytic", "L4")
    assert code == 1
    assert len(said.splitlines()) == 1
    assert "not a Prometheus page" in said
