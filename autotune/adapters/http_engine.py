"""An engine behind an HTTP port, of any kind that :mod:`autotune.adapters.kinds` describes."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

from autotune.adapters.base import Flag, Identity
from autotune.adapters.instances import Instances
from autotune.adapters.kinds import Asked, EngineKind
from autotune.adapters.page import Page
from autotune.adapters.reading import Told, engines_of, reading_of, view_of, with_told
from autotune.adapters.web import Web
from engine.clock import Clock
from engine.control_client import EngineUnreachable
from engine.stats import EngineStats
from engine.tunables import Tunable, TunableValue
from policies.restart_advice import Storage

_STARTED = "process_start_time_seconds"


class HttpEngine:
    """Implements :class:`autotune.adapters.base.RestartableEngine` for ``kind`` at ``web``."""

    def __init__(self, kind: EngineKind, web: Web, clock: Clock) -> None:
        self._kind, self._web, self._clock = kind, web, clock
        self._instances = Instances(kind.name)
        self._asked: dict[str, tuple[str, Asked]] = {}  # by label: the instance that was asked, and what it said
        self._last: dict[str, EngineStats] = {}
        self._pausing: threading.Thread | None = None

    @property
    def kind(self) -> str:
        return self._kind.name

    @property
    def url(self) -> str:
        return self._web.url

    @property
    def tunables(self) -> Mapping[str, Tunable]:
        return self._kind.tunables

    @property
    def flags(self) -> Mapping[str, Flag]:
        return self._kind.flags

    @property
    def storage(self) -> Mapping[str, Storage]:
        return self._kind.storage

    @property
    def kv_knobs(self) -> tuple[str, ...]:
        return self._kind.kv_knobs

    @property
    def slot_knob(self) -> str:
        return self._kind.slot_knob

    def read(self) -> Mapping[str, EngineStats]:
        page, names = self._page(), self._kind.names
        now_ns, started_s = self._clock.now_ns(), page.one(_STARTED)
        found: dict[str, EngineStats] = {}
        engines = engines_of(page, names)
        for label in engines:
            view = view_of(page, names, label, engines)
            reading = reading_of(view, names, now_ns)
            self._instances.name(label, reading, started_s)
            told = _together(self._kind.on_page(view), self._ask(label, reading.instance).told)
            found[label] = with_told(reading, told)
        self._last = found
        return found

    def identity(self) -> Identity:
        reading = next(iter((self._last or self.read()).values()))
        version = next((asked.version for _, asked in self._asked.values() if asked.version), "")
        return Identity(self.kind, version, reading.model)

    def healthy(self) -> bool:
        return self._web.is_ok("/health")

    def arguments(self, values: Mapping[str, TunableValue]) -> dict[Flag, str]:
        given = {self.flags[knob]: str(self.tunables[knob].parse(value)) for knob, value in values.items()}
        if self._kind.besides is not None:
            told = next((asked.told for _, asked in self._asked.values()), Told())
            given.update(self._kind.besides(values, told))
        return given

    def pause(self) -> bool:
        if not self._kind.pause:
            return False
        # Answered once the last request has ended; what became of it shows in the figures.
        self._pausing = threading.Thread(target=self._web.post, args=(self._kind.pause,), daemon=True)
        self._pausing.start()
        return True

    def resume(self) -> None:
        if self._pausing is not None:
            self._pausing.join()  # as long as a call may take: a pause that comes after its end would stay
            self._pausing = None
        if self._kind.resume:
            self._web.post(self._kind.resume)

    def forget(self) -> None:
        self._asked.clear()

    def _page(self) -> Page:
        text = self._web.text("/metrics")
        try:
            page = Page(text)
        except ValueError as error:
            raise EngineUnreachable(f"{self._web.url}/metrics: not a Prometheus page") from error
        if not page.has_prefix(self._kind.names.prefix):
            raise EngineUnreachable(
                f"{self._web.url}/metrics: has no figure of {self.kind} ({self._kind.names.prefix}...)"
            )
        return page

    def _ask(self, label: str, instance: str) -> Asked:
        """Once for each run of the engine: what does not change while it runs."""
        known = self._asked.get(label)
        if known is not None and known[0] == instance:
            return known[1]
        asked = self._kind.ask(self._web)
        if asked != Asked():  # an engine that is still starting tells nothing
            self._asked[label] = instance, asked
        return asked


def _together(page: Told, asked: Told) -> Told:
    """What either tells; the page, which is of this moment, where both do."""
    return replace(
        asked,
        model=page.model or asked.model,
        effective={**(asked.effective or {}), **(page.effective or {})},
        capacity_tokens=page.capacity_tokens or asked.capacity_tokens,
    )
