"""Sockets, state and ports: whether an engine and a daemon may have the places that they want."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

from autotune.doctor.finding import Finding, ok, problem, warning
from autotune.doctor.probes import Probes
from engine.paths import MAX_SOCKET_PATH_BYTES


def check_socket(probes: Probes, control: Path) -> Iterator[Finding]:
    """The control socket's path and folder."""
    size = len(os.fsencode(control))
    if size > MAX_SOCKET_PATH_BYTES:
        yield problem(
            "control socket",
            f"{control} has {size} bytes, a Unix socket at most {MAX_SOCKET_PATH_BYTES}",
            "name a shorter one with --control, and engine.control in the configuration",
        )
        return
    there = probes.stat(control)
    if there is not None and not stat.S_ISSOCK(there.st_mode):
        yield problem("control socket", f"{control} is no socket", "remove it, or name another with --control")
        return
    advice = "become the engine's user (sudo -u kv-autotune ...), or start the engine with --control-uid"
    yield _place("control socket", probes, control, advice, "--control, and engine.control in the configuration")


def check_state(probes: Probes, journal: Path) -> Iterator[Finding]:
    """The journal, or the folder that it will be in."""
    advice = "run the daemon as its owner, or name another with journal.path in the configuration"
    yield _place("state", probes, journal, advice, "journal.path in the configuration")


def _place(check: str, probes: Probes, path: Path, advice: str, key: str) -> Finding:
    """Whether what is there can be used, and, where nothing is, whether its folder could hold it. ``advice``: for what
    is closed to this user; ``key``: what names another place.
    """
    if probes.stat(path) is None:
        return _folder(check, probes, path.parent, key)
    if probes.access(path, os.R_OK | os.W_OK):
        return ok(check, f"{path} is there")
    return problem(check, f"{path} is there, but not for this user", advice)


def _folder(check: str, probes: Probes, folder: Path, key: str) -> Finding:
    """Whether a folder could hold something of ours: it is private and writable, or can be made."""
    there = probes.stat(folder)
    if there is None:
        above = next(parent for parent in folder.parents if probes.stat(parent) is not None)
        if probes.access(above, os.W_OK | os.X_OK):
            return ok(check, f"{folder} can be made")
        advice = (
            f"make it for this user (as root: install -d -m 700 -o USER {folder}), or name another place with {key}"
        )
        return problem(check, f"{folder} is not there, and this user may not make it in {above}", advice)
    if not stat.S_ISDIR(there.st_mode):
        return problem(check, f"{folder} is no folder", f"remove it, or name another place with {key}")
    if not probes.access(folder, os.W_OK | os.X_OK):
        advice = f"become its owner (sudo -u kv-autotune ...), or name another place with {key}"
        return problem(check, f"this user may not write to {folder}", advice)
    if there.st_uid != probes.uid:
        return problem(check, f"{folder} belongs to another user ({there.st_uid})", f"name another place with {key}")
    if there.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return problem(check, f"others may write to {folder}", f"chmod 700 {folder}")
    return ok(check, f"{folder} is this user's")


def check_port(
    probes: Probes, what: str, host: str, port: int, option: str, answers: str | None = None
) -> Iterator[Finding]:
    """Whether an address is free. ``answers``: what is known to listen there, where that is one of ours."""
    if not port:
        yield ok(what, "a free port is taken")
        return
    why = probes.bind(host, port)
    if why is None:
        yield ok(what, f"{host}:{port} is free")
    elif answers:
        yield ok(what, f"{host}:{port}: {answers}")
    else:
        who = f"see who has it (ss -ltnp sport = :{port}), or choose another with {option}"
        yield problem(what, f"{host}:{port} cannot be had: {why}", who)


def check_open_files(probes: Probes) -> Iterator[Finding]:
    """An engine holds a connection per client."""
    for line in (probes.read(Path("/proc/self/limits")) or "").splitlines():
        if line.startswith("Max open files"):
            soft = line.split()[3]
            if soft.isdecimal() and int(soft) < 1024:
                yield warning("open files", f"at most {soft}", "raise it: ulimit -n 16384")
            else:
                yield ok("open files", f"up to {soft}")
