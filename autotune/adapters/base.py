"""What an engine is to whoever watches it: figures, knobs, health and identity, the same for every kind of engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.stats import EngineStats
from engine.tunables import Tunable, TunableValue
from policies.restart_advice import Storage


@dataclass(frozen=True)
class Identity:
    """Who answers. ``version`` and ``model`` are empty where the engine does not tell them."""

    kind: str
    version: str = ""
    model: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.kind, self.version, f"({self.model})" if self.model else "")))


class EngineAdapter(Protocol):
    """One running engine. Use it from one thread at a time; no call may block for longer than its timeout.

    An engine with data parallelism is several engines behind one address: their figures are kept apart by ``label``
    (the page's own, empty where there is one engine and no label), their knobs are the same.
    """

    @property
    def kind(self) -> str:
        """``autotune``, ``vllm``, ``sglang`` or ``llamacpp``."""
        ...

    @property
    def tunables(self) -> Mapping[str, Tunable]:
        """The knobs that this kind of engine has, under its own names, with their values and cost class."""
        ...

    def read(self) -> Mapping[str, EngineStats]:
        """The figures of every engine by its label, never empty. What the engine does not tell is None, never 0.

        ``effective`` has the knobs whose value is known, and only those, at declared values. ``instance`` changes when
        the engine has restarted, and counters may begin again only then. ``stamp_ns`` is of one monotonic clock for all
        readings. Raises EngineUnreachable when nobody answers, or what answers is not such an engine.
        """
        ...

    def identity(self) -> Identity:
        """Who answers. Raises EngineUnreachable."""
        ...

    def healthy(self) -> bool:
        """Whether it would serve a request now, by its own word. Never raises."""
        ...


@dataclass(frozen=True)
class Flag:
    """How a knob is said at an engine's start: a command-line argument, and the environment variable that the engine
    itself reads for it, empty where there is none.
    """

    argument: str
    variable: str = ""


class RestartableEngine(EngineAdapter, Protocol):
    """An engine whose knobs are set at its start. ``flags`` and ``storage`` are by knob and by value."""

    @property
    def flags(self) -> Mapping[str, Flag]: ...

    @property
    def storage(self) -> Mapping[str, Storage]:
        """By value of the knobs in ``kv_knobs``."""
        ...

    @property
    def kv_knobs(self) -> tuple[str, ...]:
        """The knobs of the KV's format, which are moved together."""
        ...

    @property
    def slot_knob(self) -> str:
        """The knob of how many requests memory is set aside for, empty where memory is not set aside by request."""
        ...

    def arguments(self, values: Mapping[str, TunableValue]) -> dict[Flag, str]:
        """What a start has to be given so that the knobs have these values. Raises ValueError for values that it
        cannot give.
        """
        ...

    def pause(self) -> bool:
        """Ask the engine to finish what it has and begin nothing new; False where it has no such thing. Never raises,
        never waits for the requests.
        """
        ...

    def resume(self) -> None:
        """Take the pause back. Never raises."""
        ...

    def forget(self) -> None:
        """Ask anew, at the next reading, for what does not change while an engine runs: it may be another run."""
        ...
