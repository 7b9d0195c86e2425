"""What systemd says of the units: how exposed each service is, and whether anything is wrong with them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Final

from autotune.bench.context import Context, Outcome

_UNITS: Final = Path(__file__).parents[2] / "systemd"
_SERVICES: Final = ("autotune", "autotune-engine")
_MOST: Final = 2.0
_OVERALL: Final = re.compile(r"Overall exposure level for \S+: ([0-9.]+)")
_STAND_IN: Final = Path("/usr/bin/true")  # what units name is not installed here


def run(context: Context) -> Outcome:
    reason = _why_not()
    if reason:
        context.log(f"exposure: {reason}")
        return Outcome({"security_exposure": None, "units_verified": None, "security_skipped": reason})
    exposure = {name: _exposure(name) for name in _SERVICES}
    complaints = _complaints(context.place("units"))
    figures: dict[str, Any] = {"security_exposure": exposure, "units_verified": not complaints}
    missed = [f"{name} is exposed to {value}" for name, value in exposure.items() if value is None or value > _MOST]
    return Outcome(figures, missed + [f"systemd-analyze verify: {line}" for line in complaints])


def _why_not() -> str:
    if shutil.which("systemd-analyze") is None:
        return "systemd-analyze is not installed"
    return "" if _UNITS.is_dir() else "the unit files are not beside this package"


def _exposure(name: str) -> float | None:
    done = _systemd("security", "--offline=true", str(_UNITS / f"{name}.service"))
    found = _OVERALL.search(done.stdout)
    return float(found[1]) if found else None


def _complaints(folder: Path) -> list[str]:
    """Of ``verify``, over copies whose program exists."""
    copies = []
    for unit in sorted((*_UNITS.glob("*.service"), *_UNITS.glob("*.timer"))):
        text = unit.read_text(encoding="utf-8").replace("/opt/kv-autotune/bin/autotune", str(_STAND_IN))
        copies.append(folder / unit.name)
        copies[-1].write_text(text, encoding="utf-8")
    done = _systemd("verify", "--man=no", *map(str, copies))
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return lines or ([] if done.returncode == 0 else [f"exit code {done.returncode}"])


def _systemd(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(  # noqa: S603  # fixed arguments
        ["systemd-analyze", *arguments],  # noqa: S607  # wherever it is
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
