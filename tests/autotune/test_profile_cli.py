"""``autotune profile``: mistakes are one line before anything is loaded, and there is something to be seen at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from autotune import profiling
from autotune.cli import app
from autotune.cli._shared import fail_with
from engine.errors import EngineError

Command = Callable[..., tuple[int, str, str]]
MODEL = Path(profiling.__file__).parent.parent / "engine" / "bundled" / "model"


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
