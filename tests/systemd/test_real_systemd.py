"""Both services under a real systemd of their own: started, reloaded, frozen, killed and stopped (root, minutes)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from autotune.demo.bundled import bundled_model

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
PROGRAM = """#!{python}
import site, sys
site.addsitedir({packages!r})
sys.path.insert(0, {repository!r})
from autotune.cli import main
main()
"""
DROP_IN = """[Service]
BindReadOnlyPaths={folder} {repository}
StandardOutput=append:{folder}/{name}.log
StandardError=append:{folder}/{name}.log
WatchdogSec={watchdog_s}
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="namespaces for a whole systemd need root"),
    pytest.mark.skipif(not Path("/lib/systemd/systemd").exists(), reason="systemd is not installed"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed"),
]


def readable_python() -> str:
    """An interpreter of this version that every user can run: the services' user is not the one that runs tests."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    for path in (Path(sys.executable).resolve(), Path(f"/usr/bin/{version}"), Path(f"/usr/local/bin/{version}")):
        if path.exists() and all(folder.stat().st_mode & 0o001 for folder in path.resolve().parents):
            return str(path)
    pytest.skip(f"no {version} that other users may run")


@pytest.fixture
def folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="kv-nested-", dir="/tmp"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made, ignore_errors=True)


def prepare(folder: Path) -> None:
    program = folder / "prefix" / "bin" / "autotune"
    program.parent.mkdir(parents=True)
    program.write_text(
        PROGRAM.format(python=readable_python(), packages=sysconfig.get_path("purelib"), repository=str(REPOSITORY))
    )
    program.chmod(0o755)
    subprocess.run(
        ["make", "-s", "-C", str(REPOSITORY), "install", f"DESTDIR={folder / 'root'}", f"PREFIX={folder / 'prefix'}"],
        check=True,
        timeout=60,
    )
    engine = f'Environment=KV_MODEL={bundled_model()}\nEnvironment="KV_OPTIONS=--kv-pool-bytes 16M --threads 1"\n'
    for name, watchdog_s, more in (("autotune-engine", 20, engine), ("autotune", 10, "")):
        place = folder / "root/etc/systemd/system" / f"{name}.service.d" / "test.conf"
        place.parent.mkdir(parents=True, exist_ok=True)
        text = DROP_IN.format(folder=folder, repository=REPOSITORY, name=name, watchdog_s=watchdog_s)
        place.write_text(text + more)


def test_both_services_live_under_systemd(folder: Path) -> None:
    prepare(folder)
    done = subprocess.run(
        [str(HERE / "nested.sh"), str(folder), str(HERE / "machine.sh")],
        capture_output=True, text=True, check=False, timeout=800, env={**os.environ, "NESTED_LIMIT_S": "700"},
    )  # fmt: skip
    facts = dict(
        line.removeprefix("FACT ").split("=", 1) for line in done.stdout.splitlines() if line.startswith("FACT ")
    )
    logs = "\n".join(path.read_text()[-2000:] for path in sorted(folder.glob("*.log")))
    assert facts.get("start") == "0", done.stdout + done.stderr + logs
    for unit in ("autotune-engine", "autotune"):
        assert facts[f"{unit}.active"] == "active"
        assert facts[f"{unit}.user"] == "kv-autotune"
        assert facts[f"{unit}.no_new_privs"] == "1"
        assert facts[f"{unit}.seccomp"] == "2"
        assert facts[f"{unit}.restarted"] == facts[f"{unit}.back"] == facts[f"{unit}.other_process"] == "0"
        assert facts[f"{unit}.result"] == "success"
    assert facts["autotune-engine.status"] == "serving model"
    assert facts["socket"] == "600 kv-autotune"
    assert '"completion_tokens":4' in facts["answer"]
    assert facts["daemon_health"] == "200"
    assert facts["reload"] == "0"
    assert "applied tick_s" in facts["reload_status"]
    assert "reload refused, nothing changed: nonsense" in facts["bad_reload_status"]
    assert facts["bad_reload_active"] == "active"
    assert facts["killed_engine_back"] == "0"
    assert facts["daemon_stayed"] == "1"  # the one restart of its own freeze, none for the engine's death
    assert facts["stop"] == "0"
