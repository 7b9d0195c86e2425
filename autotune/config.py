"""Reading the daemon's configuration: a YAML file checked whole, every fault reported by its dotted path."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from autotune.schema import Config, KeyedError, Section

__all__ = ["Config", "ConfigError", "load_config", "parse_config", "problems_of"]


class ConfigError(Exception):
    """The configuration is not usable. ``problems`` has one line per fault, ``path: what is wrong``."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


class _Loader(yaml.SafeLoader):
    """Safe YAML with two surprises less.

    A key given twice is refused, where plain YAML silently keeps the last; and only ``true`` and ``false`` are
    booleans, so that ``mode: off`` means the word.
    """

    # A copy of its own, so that YAML elsewhere in the process keeps its meaning.
    yaml_implicit_resolvers = {  # noqa: RUF012  # the base class's own declaration
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:bool"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            if key is not None:
                seen.add(key)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("^(?:true|false)$"), list("tf"))


def parse_config(text: str) -> Config:
    """The configuration in ``text``. Raises ConfigError listing every fault."""
    try:
        data = yaml.load(text, Loader=_Loader)  # noqa: S506  # a SafeLoader with one more check
    except yaml.YAMLError as error:
        raise ConfigError([_yaml_problem(error)]) from error
    except RecursionError as error:
        raise ConfigError(["not valid YAML: nested too deeply"]) from error
    except Exception as error:  # the library lets its conversions' own errors through, for 2026-13-01 say
        raise ConfigError([f"not valid YAML: {error}".splitlines()[0]]) from error
    if data is None:
        data = {}
    if not isinstance(data, Mapping):
        raise ConfigError([f"the file must hold keys and values, not a {type(data).__name__}"])
    # A section given without content (``guard:``) is an empty section, not null.
    data = {key: {} if value is None and _is_section(key) else value for key, value in data.items()}
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError(problems_of(error)) from error


def load_config(path: Path) -> Config:
    """The configuration in a file. Raises ConfigError, for a missing or unreadable file too."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 text at byte {error.start}"]) from error
    return parse_config(text)


def _is_section(key: object) -> bool:
    info = Config.model_fields.get(key) if isinstance(key, str) else None
    return info is not None and isinstance(info.annotation, type) and issubclass(info.annotation, Section)


def problems_of(error: ValidationError) -> list[str]:
    """One line per fault that validation found, ``path: what is wrong``."""
    return [line for detail in error.errors() for line in _describe(detail)]


def _describe(detail: Mapping[str, Any]) -> list[str]:
    path = ".".join(str(part) for part in detail["loc"])
    if detail["type"] == "extra_forbidden":
        return [f"{path}: unknown key; known here: {', '.join(_known_keys(detail['loc'][:-1]))}"]
    ours = detail.get("ctx", {}).get("error")
    if isinstance(ours, KeyedError):
        return [f"{path}.{key}: {text}".lstrip(".") for key, text in ours.problems.items()]
    given = repr(detail["input"])
    message = detail["msg"][0].lower() + detail["msg"][1:]
    return [f"{path}: {message}, got {given if len(given) <= 60 else given[:57] + '…'}"]


def _known_keys(parents: tuple[int | str, ...]) -> list[str]:
    model: type[BaseModel] = Config
    for name in parents:
        annotation = model.model_fields[str(name)].annotation
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return list(model.model_fields)


def _yaml_problem(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    what = getattr(error, "problem", None) or str(error).splitlines()[0]
    where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
    return f"not valid YAML{where}: {what}"
