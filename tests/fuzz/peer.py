"""One server that the product asks something: its good answers, bad ones made of them, and who asks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from canned import Canned, answer, kind_of, ok
from daemon_rig import Rig
from hypothesis import strategies as st
from mangle import as_json, bitten, mangled

Documents = Mapping[str, Any]
TURNS: Final = 3


@dataclass(frozen=True)
class Peer:
    """``documents``: good answers by path, bytes as they are and everything else as JSON. ``ask`` is given the server,
    and a folder with its socket ``s`` if it is ``unix``; it raises for what must not be.
    """

    name: str
    documents: Callable[[], Documents]
    ask: Callable[[Canned, Path], object]
    unix: bool = False
    examples: int = 30
    page: Callable[[str], st.SearchStrategy[bytes]] = field(default=lambda text: bitten(text.encode()))

    def bad(self, good: Documents) -> st.SearchStrategy[tuple[str, bytes]]:
        """A path, and all that is sent for it."""
        return st.one_of(*(self._bad_one(path, found) for path, found in good.items()))

    def _bad_one(self, path: str, found: Any) -> st.SearchStrategy[tuple[str, bytes]]:
        kind = kind_of(found) if isinstance(found, bytes) else "application/json"
        if isinstance(found, bytes):
            bodies, whole = st.one_of(self.page(found.decode()), bitten(found)), ok(found)
        else:
            bodies, whole = mangled(found).map(as_json), ok(json.dumps(found).encode())
        statuses = st.sampled_from([200, 200, 200, 200, 204, 304, 404, 500])
        answers = st.builds(answer, statuses, bodies, st.just(kind))
        return st.one_of(answers, answers, answers, bitten(whole)).map(lambda sent: (path, sent))


def turned(rig: Rig) -> None:
    """Its loop goes on, tick by tick, and none of them fails."""
    rig.run_s(TURNS)
    assert rig.loop.ticks >= TURNS
    assert rig.metric("autotune_tick_errors_total") == 0, rig.ticks()[-1].body.get("reason")
