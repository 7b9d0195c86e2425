"""Rule files: what threshold policies are made of, as data. Every fault is one line with the path of the bad key.

version: 1
name: mine
otherwise: {kv_format: native}        # where knobs go when no active rule asks for anything
dwell: 10s                            # a knob that moved stays for so long (default 0)
rules:
  - name: memory-pressure             # the scenario that decisions are labelled with
    because: KV memory runs out       # said to people, the observed numbers follow
    priority: 10                      # where two active rules set one knob, the larger wins (default 0)
    when: kv_demand > 0.8             # see policies/expressions.py
    for: 2s                           # ... true for so long makes the rule active (default 0)
    release: kv_demand < 0.5          # it stays active until this (default: when no longer holds)
    release_for: 30s                  # ... has been true for so long (default 0)
    set: {kv_format: int8}            # what it asks for while active; moved one knob per tick, in this order
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final

from engine.text import one_line
from engine.tunables import TunableValue, parse_change
from policies.expressions import Condition, ExpressionError, parse_condition
from policies.strict_yaml import YamlProblem, load_strict

_VERSION: Final = 1
_MAX_RULES: Final = 64  # scenarios are metric labels: a bounded set
_NAME: Final = re.compile(r"[a-z][a-z0-9_-]{0,39}")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|m|min|h)?")
_UNIT_S: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, None: 1.0}
_MAX_DURATION_S: Final = 86400.0
_MAX_CHARS: Final = 1000  # of one problem, which may quote what is in the file
_FILE_KEYS: Final = ("version", "name", "description", "otherwise", "dwell", "rules")
_RULE_KEYS: Final = ("name", "because", "priority", "when", "for", "release", "release_for", "set")


class RuleError(ValueError):
    """A rule file cannot be used. ``problems``: one line per fault, ``path: what is wrong``."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = [one_line(problem, _MAX_CHARS) for problem in problems]
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True)
class Rule:
    """One rule; durations in seconds. ``release`` None: released as soon as ``when`` does not hold."""

    name: str
    because: str
    when: Condition
    sets: tuple[tuple[str, TunableValue], ...]
    priority: int = 0
    for_s: float = 0.0
    release: Condition | None = None
    release_for_s: float = 0.0


@dataclass(frozen=True)
class RuleSet:
    """A whole file. ``rules`` in order of precedence: priority, then place in the file."""

    name: str
    rules: tuple[Rule, ...]
    otherwise: tuple[tuple[str, TunableValue], ...] = ()
    dwell_s: float = 0.0
    description: str = ""


def presets() -> tuple[str, ...]:
    """Names of the rule files that come with the package."""
    folder = resources.files("policies") / "presets"
    return tuple(sorted(entry.name.removesuffix(".yaml") for entry in folder.iterdir() if entry.name.endswith(".yaml")))


def preset_text(name: str) -> str:
    """The YAML of a preset."""
    return (resources.files("policies") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")


def load_rules(name_or_path: str | Path) -> RuleSet:
    """A preset by its name, or a file by its path. Raises RuleError, also when it cannot be read."""
    if str(name_or_path) in presets():
        return parse_rules(preset_text(str(name_or_path)))
    path = Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise RuleError([f"{path}: {reason}; it is neither a file nor a preset ({', '.join(presets())})"]) from error
    try:
        return parse_rules(text)
    except RuleError as error:
        raise RuleError([f"{path}: {problem}" for problem in error.problems]) from error


def parse_rules(text: str) -> RuleSet:
    """The rules in a YAML text. Raises RuleError with every fault found."""
    try:
        data = load_strict(text)
    except YamlProblem as problem:
        raise RuleError([str(problem)]) from problem
    return _Reader().rule_set(data)


class _Reader:
    """Checks a parsed file and collects what is wrong with it."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def rule_set(self, data: object) -> RuleSet:
        top = self._mapping(data, "file", _FILE_KEYS)
        if top.get("version") != _VERSION:
            self._wrong("version", f"must be {_VERSION}, got {top.get('version')!r}")
        rows = top.get("rules")
        if not isinstance(rows, list) or not rows or len(rows) > _MAX_RULES:
            self._wrong("rules", f"must be a list of 1 to {_MAX_RULES} rules")
            rows = []
        rules = [self._rule(row, f"rules[{index}]") for index, row in enumerate(rows)]
        kept = [rule for rule in rules if rule is not None]
        for index, rule in enumerate(rules):
            if rule is not None and any(rule.name == other.name for other in rules[:index] if other is not None):
                self._wrong(f"rules[{index}].name", f"{rule.name!r} is taken by an earlier rule")
        result = RuleSet(
            name=self._name(top.get("name"), "name"),
            rules=tuple(sorted(kept, key=lambda rule: -rule.priority)),
            otherwise=self._values(top.get("otherwise", {}), "otherwise"),
            dwell_s=self._duration(top.get("dwell", 0), "dwell"),
            description=str(top.get("description", "")),
        )
        if self.problems:
            raise RuleError(self.problems)
        return result

    def _rule(self, data: object, path: str) -> Rule | None:
        before = len(self.problems)
        row = self._mapping(data, path, _RULE_KEYS)
        if len(self.problems) > before and not row:
            return None
        when = self._condition(row.get("when"), f"{path}.when")
        release = self._condition(row["release"], f"{path}.release") if "release" in row else None
        sets = self._values(row.get("set"), f"{path}.set")
        if not sets and isinstance(row.get("set"), dict):
            self._wrong(f"{path}.set", "must set at least one knob")
        because, priority = row.get("because", ""), row.get("priority", 0)
        if not isinstance(because, str):
            self._wrong(f"{path}.because", f"must be text, got {because!r}")
        if isinstance(priority, bool) or not isinstance(priority, int):
            self._wrong(f"{path}.priority", f"must be a whole number, got {priority!r}")
        name = self._name(row.get("name"), f"{path}.name")
        for_s = self._duration(row.get("for", 0), f"{path}.for")
        release_for_s = self._duration(row.get("release_for", 0), f"{path}.release_for")
        if len(self.problems) > before or when is None:
            return None
        return Rule(name, because.strip() or name, when, sets, priority, for_s, release, release_for_s)

    def _wrong(self, path: str, what: str) -> None:
        self.problems.append(f"{path}: {what}")

    def _mapping(self, data: object, path: str, known: tuple[str, ...]) -> Mapping[str, Any]:
        if not isinstance(data, dict):
            self._wrong(path, f"must be a mapping with {', '.join(known)}")
            return {}
        for key in data:
            if key not in known:
                self._wrong(str(key) if path == "file" else f"{path}.{key}", f"unknown key; known: {', '.join(known)}")
        return data

    def _name(self, value: object, path: str) -> str:
        if not isinstance(value, str) or not _NAME.fullmatch(value):
            self._wrong(path, f"must be 1 to 40 of a-z, 0-9, - and _, starting with a letter; got {value!r}")
            return ""
        return value

    def _condition(self, text: object, path: str) -> Condition | None:
        try:
            return parse_condition(text)
        except ExpressionError as error:
            self._wrong(path, str(error))
            return None

    def _values(self, data: object, path: str) -> tuple[tuple[str, TunableValue], ...]:
        if not isinstance(data, dict):
            self._wrong(path, "must be a mapping of knobs to values")
            return ()
        values: list[tuple[str, TunableValue]] = []
        for knob, value in data.items():
            try:
                values.append((str(knob), parse_change(str(knob), value)))
            except ValueError as error:
                self._wrong(f"{path}.{knob}", str(error).removeprefix(f"{knob}: "))
        return tuple(values)

    def _duration(self, value: object, path: str) -> float:
        match = None if isinstance(value, bool) else _DURATION.fullmatch(str(value).strip())
        seconds = float(match[1]) * _UNIT_S[match[2]] if match else -1.0
        if not 0 <= seconds <= _MAX_DURATION_S:
            self._wrong(path, f"must be a duration such as 5, 5s or 2m, at most a day; got {value!r}")
            return 0.0
        return seconds
