"""How checks look at the machine: a few injected functions, so that tests can show them another one."""

from __future__ import annotations

import os
import shutil
import socket
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import packages_distributions
from pathlib import Path

from autotune.doctor.torch_facts import TorchFacts, ask_torch


@dataclass(frozen=True)
class Probes:
    """``read``: a file's text, None where it cannot be read. ``entries``: names in a folder, none where it cannot be
    read. ``access``: as os.access. ``stat``: as os.stat, None where there is nothing. ``which``: path of a program.
    ``bind``: why a TCP address cannot be taken, None where it can. ``environ``, ``uid``, ``cwd``: of this process.
    ``torch``: see :class:`TorchFacts`; asked once. ``owners``: distributions by import name. ``path``: where Python
    looks for packages. ``include``: folder of Python's headers.
    """

    read: Callable[[Path], str | None]
    entries: Callable[[Path], Sequence[str]]
    access: Callable[[Path, int], bool]
    stat: Callable[[Path], os.stat_result | None]
    which: Callable[[str], str | None]
    bind: Callable[[str, int], str | None]
    torch: Callable[[], TorchFacts]
    owners: Callable[[], Mapping[str, Sequence[str]]]
    environ: Mapping[str, str]
    uid: int
    cwd: Path
    path: Sequence[str]
    include: Path


def real_probes(path: Sequence[str]) -> Probes:
    """This machine. ``path``: sys.path."""
    return Probes(
        read=_read,
        entries=_entries,
        access=os.access,
        stat=_stat,
        which=shutil.which,
        bind=_bind,
        torch=cache(ask_torch),
        owners=packages_distributions,
        environ=os.environ,
        uid=os.geteuid(),
        cwd=Path.cwd(),
        path=path,
        include=Path(sysconfig.get_paths()["include"]),
    )


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _entries(path: Path) -> Sequence[str]:
    try:
        return sorted(entry.name for entry in path.iterdir())
    except OSError:
        return ()


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _bind(host: str, port: int) -> str | None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as bound:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
    except (OSError, OverflowError, UnicodeError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None
