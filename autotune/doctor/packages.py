"""Import packages that take the place of ours: a local ``envs/``, or Hugging Face's ``kernels``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from autotune.doctor.finding import Finding, ok, problem, warning
from autotune.doctor.probes import Probes
from autotune.venv_check import OUR_PACKAGES, foreign_owners


def check_shadows(probes: Probes, home: Path) -> Iterator[Finding]:
    """``home``: the folder that our packages are imported from."""
    shadows = [
        (package, place)
        for package in OUR_PACKAGES
        if (place := _first(probes, package, home)) is not None and place.parent.resolve() != home
    ]
    for package, place in shadows:
        yield problem(
            "packages",
            f"`import {package}` finds {place} before ours in {home}",
            f"take {place.parent} off PYTHONPATH, start from another folder, or rename it",
        )
    for package in OUR_PACKAGES:
        place = _package(probes, probes.cwd, package)
        if place is not None and probes.cwd != home and (package, place) not in shadows:
            yield warning(
                "packages",
                f"{place} is in the current folder",
                f"`python -m ...` from here would import it in place of our {package}: start from another folder",
            )
    foreign = foreign_owners(probes.owners())
    for line in foreign:
        yield problem("packages", line, "give kv-autotune a virtual environment of its own")
    if not shadows and not foreign:
        yield ok("packages", f"ours, from {home}")


def _first(probes: Probes, package: str, home: Path) -> Path | None:
    """Where an import finds a package: the first of the path, where an editable installation comes last."""
    for entry in [*probes.path, str(home)]:
        folder = Path(entry) if entry else probes.cwd
        place = _package(probes, folder, package)
        if place is not None:
            return place
    return None


def _package(probes: Probes, folder: Path, package: str) -> Path | None:
    """A package or module in a folder; a folder without __init__ gives way to any package and does not count."""
    if probes.stat(folder / package / "__init__.py") is not None:
        return folder / package
    module = folder / f"{package}.py"
    return module if probes.stat(module) is not None else None
