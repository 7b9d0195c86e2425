"""The reference of the daemon's configuration (docs/configuration.md), out of its schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, get_args, get_origin

import yaml
from pydantic.fields import FieldInfo

from autotune.schema import RESTART, Config, Section

_HEAD: Final = """# Configuration

Every key of the daemon's configuration, a YAML file. All keys may be left out, and an empty file is valid; an unknown
key is an error. `autotune check-config FILE` checks one, `autotune reload` takes a changed one whole or not at all;
keys marked *restart* wait for the daemon's next start. `systemd/autotune.yaml` is the same as a file to copy; what to
turn first: [Tuning](tune.md).
"""
_TABLE: Final = "\n| key | default | values | |\n|---|---|---|---|\n"
_KINDS: Final[dict[Any, str]] = {
    int: "whole number", float: "number", str: "text", bool: "`true` · `false`", Path: "path",
}  # fmt: skip
_GENERIC: Final[dict[Any, str]] = {dict: "mapping", tuple: "list"}
_BOUNDS: Final = (("gt", ">"), ("ge", "≥"), ("lt", "<"), ("le", "≤"))


def configuration_page() -> str:
    """The page without its header: a table for the top of the file, and one for each section below it."""
    config = Config()
    parts = [_HEAD, _TABLE, *_rows(config, "", deep=False)]
    for name, section in config:
        if isinstance(section, Section):
            told = " ".join((type(section).__doc__ or "").split())
            parts += [f"\n## {name}\n\n{told}\n", _TABLE, *_rows(section, f"{name}.", deep=True)]
    return "".join(parts)


def _rows(section: Section, prefix: str, *, deep: bool) -> Iterator[str]:
    """A line per key; those of sections within only if ``deep``."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        if not isinstance(value, Section):
            restart = "*restart* " if info.json_schema_extra == RESTART else ""
            yield f"| `{prefix}{name}` | `{_shown(value)}` | {_values(info)} | {restart}{info.description} |\n"
        elif deep:
            yield from _rows(value, f"{prefix}{name}.", deep=True)


def _shown(value: object) -> str:
    """As one would write it in the file."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    text: str = yaml.safe_dump(list(value) if isinstance(value, tuple) else value, default_flow_style=True)
    return text.removesuffix("...\n").strip()


def _values(info: FieldInfo) -> str:
    kind: Any = info.annotation
    or_null = ""
    if get_origin(kind) is UnionType:
        (kind,) = (one for one in get_args(kind) if one is not NoneType)
        or_null = " or null"
    if get_origin(kind) is Literal:
        return " · ".join(f"`{value}`" for value in get_args(kind))
    bounds = [(sign, getattr(one, name)) for name, sign in _BOUNDS for one in info.metadata if hasattr(one, name)]
    limits = " and ".join(f"{sign} {limit:,}" for sign, limit in bounds)
    return f"{_KINDS.get(kind) or _GENERIC[get_origin(kind)]} {limits}".rstrip() + or_null
