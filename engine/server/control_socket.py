"""The control API's socket: a path that one engine has at a time, and peers that are known by their credentials."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Collection
from pathlib import Path
from typing import cast

from uvicorn.protocols.http.h11_impl import H11Protocol

from engine.errors import EngineError
from engine.paths import MAX_SOCKET_PATH_BYTES

_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid


class ControlSocket:
    """A bound, listening Unix socket. Two engines cannot share a path: a lock file beside it decides races, and a
    socket left behind by a dead engine is replaced.
    """

    def __init__(self, path: Path, *, mode: int = 0o600) -> None:
        """Raises EngineError when the path is too long, in use, not ours, or cannot be made."""
        self.path = path
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            raise EngineError(
                f"control socket path {path} has {len(os.fsencode(path))} bytes, more than the {MAX_SOCKET_PATH_BYTES} "
                "that a Unix socket may have; name a shorter one with --control"
            )
        self._lock = -1
        try:
            _private_folder(path.parent)
            self._take_lock()
            self._remove_stale()
            self.socket = self._bind(mode)
        except OSError as error:
            self._drop_lock()
            raise EngineError(f"cannot create the control socket {path}: {error.strerror or error}") from error
        except EngineError:
            self._drop_lock()
            raise
        self._inode = path.stat().st_ino

    def close(self) -> None:
        """Close, and remove the path if it is still this socket, and the lock file beside it."""
        self.socket.close()
        try:
            if self.path.stat().st_ino == self._inode:
                self.path.unlink()
        except OSError:
            pass  # gone already
        self._drop_lock()

    @property
    def _lock_path(self) -> Path:
        return Path(f"{self.path}.lock")

    def _take_lock(self) -> None:
        path = self._lock_path
        while self._lock < 0:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_at(path, lock):  # not if who held it before has just removed it
                    self._lock, lock = lock, -1
            except BlockingIOError:
                raise self._in_use() from None
            finally:
                if lock >= 0:
                    os.close(lock)

    def _drop_lock(self) -> None:
        lock, self._lock = self._lock, -1
        if lock < 0:
            return
        path = self._lock_path
        with contextlib.suppress(OSError):
            if _is_at(path, lock):  # while it is held: nobody else can have taken it
                path.unlink()
        os.close(lock)

    def _remove_stale(self) -> None:
        try:
            kind = self.path.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(kind):
            raise EngineError(f"{self.path} exists and is not a socket; remove it or name another with --control")
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1)
            try:
                probe.connect(str(self.path))
            except (ConnectionRefusedError, FileNotFoundError):
                self.path.unlink(missing_ok=True)
                return
            except OSError:
                pass  # something holds it, even if it does not answer us
        raise self._in_use()

    def _in_use(self) -> EngineError:
        return EngineError(f"another engine listens on {self.path}; stop it or name another socket with --control")

    def _bind(self, mode: int) -> socket.socket:
        bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            # The folder is private, and the mode is set before anything is accepted.
            bound.bind(str(self.path))
            self.path.chmod(mode)
            bound.listen(64)
            bound.setblocking(False)
        except OSError:
            bound.close()
            raise
        return bound


def peer_checked_protocol(allowed_uids: Collection[int]) -> type[asyncio.Protocol]:
    """A uvicorn protocol that closes connections of peers with another uid than these."""
    allowed = frozenset(allowed_uids)

    class PeerCheckedProtocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            peer = cast("socket.socket", transport.get_extra_info("socket"))
            raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            _, uid, _ = _CREDENTIALS.unpack(raw)
            super().connection_made(transport)
            if uid not in allowed:
                transport.abort()

    return PeerCheckedProtocol


def allowed_uids(extra: Collection[int] = ()) -> frozenset[int]:
    """The engine's own user, root, and those configured."""
    return frozenset({os.geteuid(), 0, *extra})


def _is_at(path: Path, handle: int) -> bool:
    """Whether an open file is the one that is found there."""
    try:
        there = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(there, os.fstat(handle))


def _private_folder(folder: Path) -> None:
    """Make the folder 0700, or accept one that others can neither own nor write to."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid not in {os.geteuid(), 0}:
        raise EngineError(f"{folder} belongs to another user; name another control socket with --control")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise EngineError(f"{folder} is writable for everyone; name another control socket with --control")
