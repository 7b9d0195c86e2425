"""Reading the daemon's configuration: a YAML file checked whole, every fault reported by its dotted path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from autotune.schema import Config, KeyedError, PolicySection, Section
from engine.text import one_line
from policies.strict_yaml import YamlProblem, load_strict

__all__ = ["Config", "ConfigError", "files_named_in", "load_config", "parse_config", "problems_of"]

_FILES: Final = ("rules", "profile")

MOST_CHARS: Final = 1000  # of one problem, which may quote what is in the file


class ConfigError(Exception):
    """The configuration is not usable. ``problems`` has one line per fault, ``path: what is wrong``."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = [one_line(problem, MOST_CHARS) for problem in problems]
        super().__init__("\n".join(self.problems))


def parse_config(text: str) -> Config:
    """The configuration in ``text``. Raises ConfigError listing every fault."""
    try:
        data = load_strict(text)
    except YamlProblem as problem:
        raise ConfigError([str(problem)]) from problem
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
    return parse_config(_text_of(path))


def files_named_in(path: Path) -> Config | None:
    """Of a configuration that cannot be used: one with nothing but the files that its policy section names, so that
    their faults can be told with the others. None where not even these can be made out.
    """
    try:
        data = load_strict(_text_of(path))
        section = data["policy"] if isinstance(data, Mapping) else None
        if not isinstance(section, Mapping):
            return None
        named = {key: section[key] for key in _FILES if isinstance(section.get(key), str) and section[key]}
        return Config(policy=PolicySection.model_validate(named))
    except (ConfigError, YamlProblem, ValidationError, KeyError):
        return None


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError([f"{path}: {error.strerror or error}"]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([f"{path}: not UTF-8 text at byte {error.start}"]) from error


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
