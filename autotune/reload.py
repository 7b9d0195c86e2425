"""What a reload does with a changed configuration: all of it or nothing, and told key by key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import ValidationError

from autotune.config import problems_of
from autotune.schema import RESTART, Config, Section


class Reload(NamedTuple):
    """What a reload does: dotted keys by outcome, and the configuration in force after it.

    ``rejected`` holds problem lines; when it is not empty the other two are empty and ``config`` is the old one.
    """

    config: Config
    applied: list[str]
    needs_restart: list[str]
    rejected: list[str]

    def summary(self) -> str:
        """One line for logs and the status shown by the service manager."""
        if self.rejected:
            return f"reload refused, nothing changed: {'; '.join(self.rejected)}"
        parts = [f"applied {', '.join(self.applied)}"] if self.applied else []
        parts += [f"needs restart {', '.join(self.needs_restart)}"] if self.needs_restart else []
        return "reload: " + ("; ".join(parts) or "no change")


def plan_reload(running: Config, wanted: Config) -> Reload:
    """Sort the differences between two configurations; restart-only keys keep their running value."""
    before, after = dict(_leaves(running)), dict(_leaves(wanted))
    changed = [path for path, leaf in after.items() if leaf.value != before[path].value]
    held = [path for path in changed if after[path].needs_restart]
    merged = wanted.model_dump()
    for path in held:
        *parents, name = path.split(".")
        section = merged
        for parent in parents:
            section = section[parent]
        section[name] = before[path].value
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:  # only together with a value that waits for a restart is the file consistent
        return Reload(running, [], [], problems_of(error))
    return Reload(config, [path for path in changed if path not in held], held, [])


class _Leaf(NamedTuple):
    value: object
    needs_restart: bool


def _leaves(section: Section, prefix: str = "") -> Iterator[tuple[str, _Leaf]]:
    """Dotted path and value of every key below a section."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", _Leaf(value, info.json_schema_extra == RESTART)
