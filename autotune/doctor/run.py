"""All checks in order, over one set of probes."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import autotune
from autotune.adapters.control import WatchedEngine
from autotune.adapters.wire import watched_engine
from autotune.address import reachable
from autotune.config import Config, ConfigError
from autotune.doctor.device import check_driver, check_torch
from autotune.doctor.finding import Finding, ok, problem
from autotune.doctor.memory import check_huge_pages, check_memory
from autotune.doctor.packages import check_shadows
from autotune.doctor.places import check_open_files, check_port, check_socket, check_state
from autotune.doctor.probes import Probes
from autotune.doctor.processor import check_processor
from autotune.doctor.service import (
    ask_daemon,
    ask_engine,
    check_config,
    check_daemon,
    check_engine,
    readable_config,
)
from autotune.doctor.toolchain import check_compiler, check_headers, check_triton
from autotune.doctor.watched import check_restart, check_watched
from autotune.journal_file import default_journal
from engine.clock import RealClock
from engine.options import DEFAULT_PORT
from engine.paths import default_control_socket

SYSTEM_CONFIG: Final = Path("/etc/kv-autotune/autotune.yaml")
_PYTHONS: Final = ((3, 11), (3, 13))


@dataclass(frozen=True)
class Asked:
    """What to look at. ``engine`` and ``daemon``: what answers there, injected in tests."""

    config: Path | None
    control: Path | None = None
    engine_port: int = DEFAULT_PORT
    engine: Callable[[Path], Mapping[str, str]] = ask_engine
    daemon: Callable[[str], Mapping[str, Any] | None] = ask_daemon


def examine(probes: Probes, asked: Asked) -> Iterator[Finding]:
    """Every finding, one by one as it is found."""
    file = asked.config
    if file is None and probes.stat(SYSTEM_CONFIG) is not None:
        file = SYSTEM_CONFIG
    config = readable_config(file)
    control = asked.control or config.engine.control or default_control_socket(probes.environ, probes.uid)
    journal = config.journal.path or default_journal(probes.environ, probes.uid)
    admin = config.admin
    address = reachable(admin.host, admin.port)

    yield check_python(sys.version_info[:2], platform.system())
    yield from check_shadows(probes, Path(autotune.__file__).resolve().parents[1])
    yield from check_driver(probes)
    yield from check_torch(probes)
    yield from check_triton(probes)
    yield from check_compiler(probes)
    yield from check_headers(probes)
    yield from check_memory(probes)
    yield from check_huge_pages(probes)
    yield from check_open_files(probes)
    watched = _watched(config)
    if watched is None:
        yield from check_socket(probes, control)
    yield from check_state(probes, journal)
    yield from check_config(file)
    told: list[Mapping[str, str]] = []

    def ask() -> Mapping[str, str]:
        told.append(asked.engine(control))
        return told[0]

    if watched is None:
        yield from check_engine(probes, ask, installed_version())
        about = told[0] if told else None
        yield from check_processor(probes, about)
        answers = None if about is None else f"the engine that serves {about['model']}, as it seems"
        yield from check_port(probes, "engine port", "127.0.0.1", asked.engine_port, "autotune engine --port", answers)
    else:
        yield from check_watched(config, watched.adapter)
        yield from check_restart(probes, config)
    if not admin.enabled:
        yield ok("admin port", "switched off by the configuration")
        return
    status = asked.daemon(address) if admin.port else None
    answers = None if status is None else "a daemon of ours answers"
    yield from check_port(probes, "admin port", admin.host, admin.port, "admin.port in the configuration", answers)
    if admin.port:
        yield from check_daemon(status, address)


def _watched(config: Config) -> WatchedEngine | None:
    """The engine of another make that a configuration names; None for ours, and for one that it names wrongly."""
    try:
        return watched_engine(config, RealClock())
    except ConfigError:
        return None


def check_python(found: tuple[int, int], system: str) -> Finding:
    """Linux, and an interpreter that is supported."""
    text = f"Python {found[0]}.{found[1]} on {system}"
    if system != "Linux":
        return problem("Python", text, "run it on Linux: peer credentials and the service manager are Linux's")
    if not _PYTHONS[0] <= found <= _PYTHONS[1]:
        least, most = (".".join(map(str, version)) for version in _PYTHONS)
        return problem("Python", text, f"use Python {least} to {most}")
    return ok("Python", text)


def installed_version() -> str:
    """Of this program."""
    try:
        return version("kv-autotune")
    except PackageNotFoundError:
        return "unknown"
