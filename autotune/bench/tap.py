"""A wire tap between daemon and engine: passes everything on, notes every write, and says when one is on its way.

With it a kill can be aimed at the moment in which a change is being written, and what was written is known from outside
the daemon, whose own books are what is being tested.
"""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from engine.clock import Clock

_MOST_BYTES: Final = 8 << 20


class Moment(StrEnum):
    """Where a write can be when something dies."""

    UNSENT = "unsent"  # the daemon is about to send it: the engine never gets it
    UNANSWERED = "unanswered"  # the engine gets it, its answer goes nowhere
    ANSWERED = "answered"  # the answer has been passed on, just now


@dataclass
class Write:
    """One PATCH. ``status`` None: no answer came back; ``reached``: it was passed on to the engine."""

    stamp_ns: int
    changes: dict[str, Any]
    reason: str = ""
    reached: bool = False
    status: int | None = None
    results: dict[str, str] = field(default_factory=dict)


class Tap:
    """Listens at ``path`` for the daemon and speaks to ``engine``. Use it in ``with``."""

    def __init__(self, path: Path, engine: Path, clock: Clock) -> None:
        self._engine, self._clock = engine, clock
        self.writes: list[Write] = []
        """In the order in which they came; appended by the tap's threads."""
        self._armed: tuple[Moment, Callable[[], None]] | None = None
        self._lock = threading.Lock()
        self.fired = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._thread = threading.Thread(target=self._accept, name="tap", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def arm(self, moment: Moment, action: Callable[[], None]) -> None:
        """Have ``action`` done once, in a thread of the tap's, when the next write is at ``moment``."""
        self.fired.clear()
        with self._lock:
            self._armed = (moment, action)

    def disarm(self) -> bool:
        """Whether it had not gone off yet; it will not any more."""
        with self._lock:
            armed, self._armed = self._armed, None
        return armed is not None

    def _at(self, moment: Moment) -> bool:
        with self._lock:
            if self._armed is None or self._armed[0] is not moment:
                return False
            action, self._armed = self._armed[1], None
        action()
        self.fired.set()
        return True

    def _accept(self) -> None:
        while True:
            try:
                daemon, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(daemon,), daemon=True).start()

    def _serve(self, daemon: socket.socket) -> None:
        with (
            daemon,
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as engine,
            contextlib.suppress(OSError, ValueError),
        ):
            engine.connect(str(self._engine))
            while (request := _message(daemon)) is not None:
                if not self._pass(request, daemon, engine):
                    return

    def _pass(self, request: bytes, daemon: socket.socket, engine: socket.socket) -> bool:
        """One exchange; False when the connection is of no more use."""
        write = None
        if request.startswith(b"PATCH "):
            asked = json.loads(request.partition(b"\r\n\r\n")[2])
            write = Write(self._clock.now_ns(), asked["changes"], str(asked.get("reason", "")))
            self.writes.append(write)
            if self._at(Moment.UNSENT):
                return False
        engine.sendall(request)
        if write is not None:
            write.reached = True
            self._at(Moment.UNANSWERED)
        answer = _message(engine)
        if answer is None:
            return False
        if write is not None:
            write.status = int(answer.split(b" ", 2)[1])
            results = json.loads(answer.partition(b"\r\n\r\n")[2]).get("results", {})
            write.results = {knob: result["status"] for knob, result in results.items()}
        daemon.sendall(answer)
        if write is not None:
            self._at(Moment.ANSWERED)
        return True


def _message(stream: socket.socket) -> bytes | None:
    """One whole HTTP message with a length, None at the end of the stream. Raises ValueError for one too long."""
    data = b""
    while b"\r\n\r\n" not in data:
        part = stream.recv(65536)
        if not part:
            return None
        data += part
        if len(data) > _MOST_BYTES:
            raise ValueError("too long")
    head = data.partition(b"\r\n\r\n")[0]
    length = next((int(line.partition(b":")[2]) for line in head.split(b"\r\n")
                   if line.lower().startswith(b"content-length:")), 0)  # fmt: skip
    while len(data) < len(head) + 4 + length:
        part = stream.recv(65536)
        if not part:
            return None
        data += part
    return data
