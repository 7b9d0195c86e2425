"""The units: what systemd says of them, what `make install` puts where, and options that the program knows."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from engine.arguments import options_from, parser

REPOSITORY = Path(__file__).parents[2]
SERVICES = ("autotune-engine.service", "autotune.service", "autotune-train.service")
MOST_EXPOSED = 20  # tenths, as --threshold counts

needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
needs_make = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


def make(target: str, root: Path, *options: str) -> str:
    command = ["make", "-s", "-C", str(REPOSITORY), target, f"DESTDIR={root}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """Units as installed, for a program that exists."""
    program = tmp_path / "prefix" / "bin" / "autotune"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    make("install", tmp_path / "root", f"PREFIX={tmp_path / 'prefix'}", "GPU=1")
    return tmp_path / "root"


def files_of(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


@needs_make
@needs_analyze
def test_systemd_has_nothing_to_say_against_them(installed: Path) -> None:
    units = installed / "etc/systemd/system"
    paths = [str(path) for path in sorted(units.iterdir()) if path.is_file()]
    assert len(paths) == 4
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *paths], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_analyze
@pytest.mark.parametrize("service", SERVICES)
def test_exposure_is_at_most_two(service: str) -> None:
    command = ["systemd-analyze", "security", "--offline=true", f"--threshold={MOST_EXPOSED}"]
    done = subprocess.run(
        [*command, str(REPOSITORY / "systemd" / service)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout


@needs_make
def test_install_and_uninstall(installed: Path) -> None:
    found = files_of(installed)
    assert {f"etc/systemd/system/{name}" for name in (*SERVICES, "autotune-train.timer")} <= found
    assert "etc/systemd/system/autotune-engine.service.d/gpu.conf" in found
    assert "etc/kv-autotune/autotune.yaml" in found
    for service in SERVICES:
        text = (installed / "etc/systemd/system" / service).read_text()
        assert "/opt/kv-autotune" not in text
        assert f"{installed.parent / 'prefix'}/bin/autotune" in text
    mine = installed / "etc/kv-autotune/autotune.yaml"
    mine.write_text("mode: advise\n")
    make("install", installed)
    assert mine.read_text() == "mode: advise\n"  # an upgrade takes nobody's configuration away
    assert "Left alone" in make("uninstall", installed)
    assert files_of(installed) == {"etc/kv-autotune/autotune.yaml"}


def command_of(service: str, which: int = 0) -> list[str]:
    lines = (REPOSITORY / "systemd" / service).read_text().splitlines()
    starts = [line.partition("=")[2] for line in lines if line.startswith("ExecStart=")]
    return shlex.split(starts[which])[1:]


def test_the_engine_knows_its_options() -> None:
    verb, *arguments = command_of("autotune-engine.service")
    assert (verb, arguments.pop()) == ("engine", "$KV_OPTIONS")
    options = options_from(parser("test").parse_args(arguments))
    assert (options.host, options.port) == ("127.0.0.1", 8000)
    assert str(options.control_path) == "/run/kv-autotune/engine.sock"


@pytest.mark.parametrize(
    ("service", "which"), [("autotune.service", 0), ("autotune-train.service", 0), ("autotune-train.service", 1)]
)
def test_the_program_knows_its_options(service: str, which: int) -> None:
    verb, *arguments = command_of(service, which)
    shown = CliRunner().invoke(app, [verb, "--help"]).output
    for option in [argument for argument in arguments if argument.startswith("-")]:
        assert option in shown


def test_training_options_are_known() -> None:
    text = (REPOSITORY / "systemd/autotune-train.service").read_text()
    given = next(line for line in text.splitlines() if "TRAIN_OPTIONS=" in line).split("TRAIN_OPTIONS=")[1].strip('"')
    shown = CliRunner().invoke(app, ["train", "--help"]).output
    for option in given.split()[::2]:
        assert option in shown
