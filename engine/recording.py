"""Records traffic for replay and simulation: when requests came, how long they were, what their prompts share. Nothing
else: no text, no token ids. No torch.

A prompt is cut into chunks of 16 tokens (64 bytes of text where there are no tokens), each named by a keyed BLAKE2 hash
over its content and the name before it, as prefix caches chain theirs. The key is random, made for each file, kept in
memory only and never written: equal beginnings have equal names inside one file, and a name can be neither looked up in
a dictionary nor compared with another file's. Lengths and times are written as they are.

The form is the plain one of ``envs.workload.forms``: a recorded file is a trace. Rows are written when requests end, so
they are not in order of arrival; loaders sort.
"""

from __future__ import annotations

import fcntl
import logging
import os
import queue
import stat
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from engine.clock import Clock
from engine.errors import EngineError

CHUNK_TOKENS: Final = 16
CHUNK_BYTES: Final = 64  # 16 token ids of 4 bytes, or about 16 tokens of text
# A request with this header asks the server something about itself: it is answered like any other, and is no traffic.
PROBE_HEADER: Final = "x-autotune-probe"
DEFAULT_MAX_BYTES: Final = 256 << 20
LEAST_MAX_BYTES: Final = 64 << 10
_KEY_BYTES: Final = 32
_NAME_BYTES: Final = 7  # a name is below 2**56; among 10**6 chunks two agree by chance once in 10**5 files
_QUEUED: Final = 4096  # requests that wait to be written; more are counted and left out, so that no answer waits
_BATCH: Final = 256
_COLUMNS: Final = "arrival_s,prompt_tokens,output_tokens,finish,estimated"
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request that has ended. ``prompt``: token ids, or UTF-8 text; only hashes of it are kept.

    ``space`` separates prompts that must not count as shared although they are equal (a cache salt). ``estimated``
    names the lengths that are not exact: ``prompt``, ``output``, ``both`` or nothing.
    """

    arrival_ns: int
    prompt_tokens: int
    output_tokens: int
    prompt: Sequence[int] | bytes
    finish: str
    space: str = ""
    estimated: str = ""


class TrafficRecorder:
    """Appends exchanges to a file from a thread of its own; recording never delays or fails a request.

    The file is 0600 and at most ``max_bytes`` long: when it is full, it becomes ``FILE.1``, in place of an earlier one,
    and a new file with a new key begins. An earlier recording under the name is moved the same way at the start.
    """

    def __init__(self, path: Path, clock: Clock, *, max_bytes: int = DEFAULT_MAX_BYTES, of_text: bool = False) -> None:
        """Raises EngineError when the file cannot be made, is something other than a recording, or is being written."""
        if max_bytes < LEAST_MAX_BYTES:
            raise EngineError(f"a recording needs room for at least {LEAST_MAX_BYTES} bytes, got {max_bytes}")
        self.path = path
        self.dropped = 0
        self._header = f"{_COLUMNS},hash_ids_b{f'{CHUNK_BYTES}bytes' if of_text else CHUNK_TOKENS}\n".encode()
        self._max_bytes = max_bytes
        # Time of day, anchored once: the wall clock may jump later, gaps between arrivals may not.
        self._epoch_s = clock.wall_s() - clock.now_ns() / 1e9
        self._queue: queue.Queue[Exchange | None] = queue.Queue(_QUEUED)
        self._fd = -1
        self._size = 0
        self._key = b""
        self._failed = self._closed = False
        try:
            if self._exists():
                self._retire()
            self._begin()
        except OSError as error:
            raise EngineError(f"cannot record to {path}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def record(self, exchange: Exchange) -> None:
        """Take an exchange; returns at once. From any thread."""
        if self._failed:
            self.dropped += 1
            return
        try:
            self._queue.put_nowait(exchange)
        except queue.Full:
            self.dropped += 1

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what was taken and close the file. May be called again."""
        if self._closed:
            return
        self._closed = True
        try:
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(timeout_s)
        except queue.Full:
            pass
        if self._thread.is_alive():
            _log.error("%s: the disk takes too long; the end of the recording is lost", self.path)
            return
        self._release()
        if self.dropped:
            _log.warning("%s: %d requests were not recorded", self.path, self.dropped)

    # -- the writing thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        going = True
        while going:
            taken = [self._queue.get()]
            while len(taken) < _BATCH and not self._queue.empty():
                taken.append(self._queue.get_nowait())
            going = None not in taken
            exchanges = [exchange for exchange in taken if exchange is not None]
            try:
                self._write(exchanges)
            except OSError as error:
                self._failed = True
                self.dropped += len(exchanges)
                _log.error("%s: recording stops: %s", self.path, error.strerror)

    def _write(self, exchanges: list[Exchange]) -> None:
        if self._failed:
            self.dropped += len(exchanges)
            return
        rows = bytearray()
        for exchange in exchanges:
            row = self._row(exchange)
            if self._size + len(rows) + len(row) > self._max_bytes:
                self._put(rows)
                rows.clear()
                self._retire()
                self._begin()
                row = self._row(exchange)  # under the new file's key
            if len(self._header) + len(row) > self._max_bytes:
                self.dropped += 1
            else:
                rows += row
        self._put(rows)

    def _row(self, exchange: Exchange) -> bytes:
        names = " ".join(map(str, chunk_names(exchange.prompt, self._key, exchange.space)))
        arrival_s = self._epoch_s + exchange.arrival_ns / 1e9
        return (
            f"{arrival_s:.6f},{exchange.prompt_tokens},{exchange.output_tokens},{exchange.finish},"
            f"{exchange.estimated},{names}\n"
        ).encode()

    def _put(self, rows: bytes | bytearray) -> None:
        view = memoryview(rows)
        while view:
            written = os.write(self._fd, view)
            self._size += written
            view = view[written:]

    # -- files --------------------------------------------------------------------------------------------------------

    def _exists(self) -> bool:
        """Whether an earlier recording has the name. Raises EngineError for anything else that has it."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return False
        if not stat.S_ISREG(found.st_mode):
            raise EngineError(f"cannot record to {self.path}: it is no plain file")
        with self.path.open("rb") as stream:
            head = stream.readline(len(self._header))
            if head and not head.startswith(_COLUMNS.encode()):
                raise EngineError(f"cannot record to {self.path}: it exists and is no recording; name another file")
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise EngineError(f"cannot record to {self.path}: another process is recording to it") from None
        return True

    def _retire(self) -> None:
        self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        self._release()

    def _release(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _begin(self) -> None:
        self._key = os.urandom(_KEY_BYTES)
        self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._size = 0
        self._put(self._header)


def chunk_names(prompt: Sequence[int] | bytes, key: bytes, space: str = "") -> list[int]:
    """One name per whole chunk of a prompt, each depending on all before it and on ``space``."""
    content = prompt if isinstance(prompt, bytes) else array("I", prompt).tobytes()
    name = blake2b(space.encode("utf-8", "surrogatepass"), key=key, digest_size=_NAME_BYTES).digest()
    names = []
    for start in range(0, len(content) - CHUNK_BYTES + 1, CHUNK_BYTES):
        name = blake2b(name + content[start : start + CHUNK_BYTES], key=key, digest_size=_NAME_BYTES).digest()
        names.append(int.from_bytes(name, "big"))
    return names
