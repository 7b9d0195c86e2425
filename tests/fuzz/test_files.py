"""Whatever a file holds, who reads it either takes it or says in one line per fault what is wrong.

`make fuzz` runs these for longer.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from policy_cards import card, tensors_of

from autotune.config import Config, ConfigError, load_config, parse_config
from autotune.reload import plan_reload
from autotune.wiring import check_rules, guard_of, policy_of, settings_of, watch_of
from envs.profile import ProfileError, read_profile
from policies.card import CARD_FILE, WEIGHTS_FILE, PolicyFileError, read_policy
from policies.export import export_policy
from policies.rules import RuleError, parse_rules, preset_text, presets

LONG = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "60")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    database=None,
)
NASTY = st.one_of(
    st.none(), st.booleans(), st.integers(), st.sampled_from([0, -1, 2**31, 2**63, 2**64, 10**400, -(10**400)]),
    st.floats(), st.sampled_from(["", "\0", "\ud800", "a\nb", "!!python/object/apply:os.system [id]",
                                  "$HOME", "1e999"]),
    st.text(max_size=20), st.binary(max_size=8).map(repr), st.lists(st.integers(), max_size=3),
    st.dictionaries(st.text(max_size=5), st.integers(), max_size=3), st.just([[[[[[]]]]]]), st.just({"a": {"b": {}}}),
)  # fmt: skip


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where something may be put."""
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [path, *(place for key, value in inner for place in places(value, (*path, key)))]


@st.composite
def mangled(draw: Callable[..., Any], document: Any) -> Any:
    """The document with one to four of its parts replaced, taken out, doubled or put under another name."""
    result = copy.deepcopy(document)
    for _ in range(draw(st.integers(1, 4))):
        path = draw(st.sampled_from(places(result)))
        if not path:
            continue
        parent = result
        for key in path[:-1]:
            parent = parent[key]
        how = draw(st.sampled_from(["replace", "replace", "replace", "remove", "rename", "swap"]))
        if how == "replace":
            parent[path[-1]] = copy.deepcopy(draw(NASTY))
        elif how == "remove":
            del parent[path[-1]]
        elif how == "rename" and isinstance(parent, dict):
            parent[draw(st.text(max_size=10))] = parent.pop(path[-1])
        elif how == "swap":
            parent[path[-1]] = copy.deepcopy(draw(st.sampled_from([document, parent])))
    return result


@st.composite
def bitten(draw: Callable[..., Any], data: bytes) -> bytes:
    """The bytes with a few of them changed, cut off, doubled or put in."""
    result = bytearray(data)
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, max(0, len(result) - 1)))
        how = draw(st.sampled_from(["set", "cut", "insert", "double"]))
        if how == "set" and result:
            result[at] = draw(st.integers(0, 255))
        elif how == "cut":
            del result[at : at + draw(st.integers(1, 64))]
        elif how == "insert":
            result[at:at] = draw(st.binary(max_size=16))
        else:
            result[at:at] = result[at : at + 64]
    return bytes(result)


def as_yaml(document: Any) -> str:
    try:
        return yaml.safe_dump(document, allow_unicode=True)
    except (yaml.YAMLError, ValueError):  # what cannot be written down as YAML is tried as JSON
        return json.dumps(document, default=str)


def one_line_each(problems: list[str]) -> None:
    assert problems
    assert all(problem.strip() and "\n" not in problem and len(problem) < 3000 for problem in problems), problems


def start(text: str) -> None:
    """As a daemon starts with it, short of a process. It may be refused, and that is all."""
    try:
        config = parse_config(text)
        rules = check_rules(config)
        policy_of(config, rules, or_rules=True)
        guard_of(config)
        watch_of(config)
        settings_of(config)
        plan_reload(Config(), config)
    except ConfigError as error:
        one_line_each(error.problems)


WHOLE = json.loads(Config().model_dump_json()) | {
    "guard": {
        "allowed": {"kv_format": ["native", "int8"], "block_size": [16, 32]},
        "knob_dwell_s": {"kv_format": 3.0},
        "effects": {"canary": ["kv_format"]},
    },
    "policy": {"use": "rules", "rules": "default", "quality_budget": 0.01},
}


@LONG
@given(mangled(WHOLE).map(as_yaml))
def test_mangled_configurations(text: str) -> None:
    start(text)


@LONG
@given(st.one_of(bitten(as_yaml(WHOLE).encode()), st.binary(max_size=200)))
def test_configurations_with_wrong_bytes(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "bitten.yaml"
    path.write_bytes(data)
    try:
        load_config(path)
    except ConfigError as error:
        one_line_each(error.problems)


RULES = [yaml.safe_load(preset_text(name)) for name in presets()]


def read_rules(text: str) -> None:
    try:
        parse_rules(text)
    except RuleError as error:
        one_line_each(error.problems)


@LONG
@given(st.sampled_from(RULES).flatmap(mangled).map(as_yaml))
def test_mangled_rules(text: str) -> None:
    read_rules(text)


@LONG
@given(st.sampled_from([preset_text(name).encode() for name in presets()]).flatmap(bitten))
def test_rules_with_wrong_bytes(data: bytes) -> None:
    read_rules(data.decode("utf-8", "replace"))


WORDS = [
    "load", "kv_demand", "running", "kv_format", "'int8'", "0.5", "1e308", "-1", "known(", "rank(", "min(", "abs(", ")",
    "(", "+", "-", "*", "/", "**", "<", "<=", "==", "in", "and", "or", "not", ",", "[", "]", "__import__", ".", ":=",
    "lambda:", "if", "else", "'", "\\", "\0", "f'{load}'", "0x10", "1_0", "True", "None", "'int4'", "~", "@", "%", "//",
]  # fmt: skip


@LONG
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=40).map(" ".join))
def test_conditions_of_random_words(condition: str) -> None:
    rule = {"name": "r", "when": condition, "set": {"kv_format": "int8"}}
    read_rules(as_yaml({"version": 1, "name": "n", "rules": [rule]}))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "policy"
    made = card()
    export_policy(folder, made, tensors_of(made.network))
    read_policy(folder)
    return folder


def read_exported(folder: Path) -> None:
    try:
        read_policy(folder, profile_digest="0" * 64)
    except PolicyFileError as error:
        one_line_each([str(error)])


CARD = json.loads(card().model_dump_json())


@LONG
@given(document=mangled(CARD))
def test_mangled_cards(exported: Path, document: Any) -> None:
    good = (exported / CARD_FILE).read_bytes()
    try:
        (exported / CARD_FILE).write_bytes(json.dumps(document).encode("utf-8", "surrogatepass"))
        read_exported(exported)
    finally:
        (exported / CARD_FILE).write_bytes(good)


@LONG
@given(data=st.data())
def test_weights_with_wrong_bytes(exported: Path, data: st.DataObject) -> None:
    """The card's sum of them is right, so that they are read."""
    good, text = (exported / WEIGHTS_FILE).read_bytes(), (exported / CARD_FILE).read_text()
    length = 8 + int.from_bytes(good[:8], "little")
    bad = data.draw(bitten(good[:length])) + good[length:]
    try:
        (exported / WEIGHTS_FILE).write_bytes(bad)
        (exported / CARD_FILE).write_text(json.dumps(json.loads(text) | {"sha256": hashlib.sha256(bad).hexdigest()}))
        read_exported(exported)
    finally:
        (exported / WEIGHTS_FILE).write_bytes(good)
        (exported / CARD_FILE).write_text(text)


PROFILE = yaml.safe_load((Path(__file__).parents[2] / "envs/profiles/bundled_cpu.yaml").read_text())


@LONG
@given(document=mangled(PROFILE))
def test_mangled_profiles(tmp_path_factory: pytest.TempPathFactory, document: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "profile.yaml"
    path.write_bytes(as_yaml(document).encode("utf-8", "surrogatepass"))
    try:
        read_profile(path)
    except ProfileError as error:
        one_line_each(str(error).splitlines())
