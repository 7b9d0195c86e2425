"""What is refused when an exported policy is read, always with one line; what may be overwritten by one."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from policy_cards import card, tensors_of
from safetensors.numpy import save

from policies.card import CARD_FILE, MAX_CARD_BYTES, WEIGHTS_FILE, GuardLimits, PolicyFileError, read_policy
from policies.export import export_policy
from policies.guard import GuardConfig


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = card()
    export_policy(tmp_path / "policy", made, tensors_of(made.network))
    return tmp_path / "policy"


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads((folder / CARD_FILE).read_text())
    change(document)
    (folder / CARD_FILE).write_text(json.dumps(document))


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """``put("a", "b", 3)`` sets document["a"]["b"] to 3."""
    *keys, last, value = path

    def change(document: Any) -> None:
        for key in keys:
            document = document[key]
        document[last] = value

    return change


def swap_tunables(document: Any) -> None:
    tunables = document["spaces"]["tunables"]
    tunables[0], tunables[1] = tunables[1], tunables[0]


REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "environment": (put("environment", "kv-autotune/SimulatedEngine-v9"), "v9"),
    "order of tunables": (swap_tunables, "in this order"),
    "values of a tunable": (put("spaces", "tunables", 0, "values", ["native", "int4"]), "values of kv_format"),
    "names of observations": (put("spaces", "observation", 3, "something"), "entry 3"),
    "length of observations": (lambda d: d["spaces"]["observation"].pop(), "for 130 entries"),
    "number of actions": (put("spaces", "actions", 12), "12"),
    "other profile": (put("profile", "digest", "1" * 64), "another profile"),
    "no statistics": (lambda d: d.pop("normaliser"), "normaliser statistics are missing"),
    "no mean": (lambda d: d["normaliser"].pop("mean"), "normaliser statistics are missing"),
    "short statistics": (lambda d: d["normaliser"]["var"].pop(), "normaliser statistics are missing"),
    "negative variance": (put("normaliser", "var", 0, -1.0), "normaliser.var.0"),
    "no ranges": (put("ranges", []), "training ranges are missing"),
    "other version": (put("version", 2), "version"),
    "other kind": (put("kind", "a recipe for cake"), "kind"),
    "unknown key": (put("comment", "hello"), "comment"),
    "unknown knob": (put("guard", "knobs", ["gravity"]), "gravity"),
    "unknown algorithm": (put("algorithm", "sac"), "algorithm"),
    "other sha256": (put("sha256", "2" * 64), "sha256"),
    "a name with a line break": (put("name", "a\nb"), "name"),
    "wide network": (put("network", "widths", [131, 32, 24, 25, 38]), "tensors"),
    "huge network": (put("network", "widths", [131, 10**9, 38]), "widths"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_is_refused_with_one_line(name: str, folder: Path) -> None:
    read_policy(folder, profile_digest="0" * 64)
    change, expected = REFUSALS[name]
    edit(folder, change)
    with pytest.raises(PolicyFileError) as caught:
        read_policy(folder, profile_digest="0" * 64)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_loaded_profile_its_digest_is_not_compared(folder: Path) -> None:
    edit(folder, put("profile", "digest", "1" * 64))
    read_policy(folder)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x00" * 100, b"{", b"[]", b"null", b"[" * 100_000, b"\xff\xfe", b'{"kind": NaN}', pickle.dumps({"a": 1}),
        b'{"kind":"kv-autotune policy","version":1e999}', b" " * (MAX_CARD_BYTES + 1),
    ],
)  # fmt: skip
def test_what_is_no_card_is_refused(data: bytes, folder: Path) -> None:
    (folder / CARD_FILE).write_bytes(data)
    with pytest.raises(PolicyFileError) as caught:
        read_policy(folder)
    assert "\n" not in str(caught.value)


def with_weights(folder: Path, data: bytes) -> None:
    (folder / WEIGHTS_FILE).write_bytes(data)
    edit(folder, put("sha256", hashlib.sha256(data).hexdigest()))


def test_weights_that_are_others_than_the_card_says_are_refused(folder: Path) -> None:
    good = tensors_of(card().network)
    name = "1.weight"
    variants = {
        "missing": {key: value for key, value in good.items() if key != name},
        "more": good | {"9.weight": np.zeros(1, np.float32)},
        "shape": good | {name: good[name].T.copy()},
        "dtype": good | {name: good[name].astype(np.float64)},
        "NaN": good | {name: np.full_like(good[name], np.nan)},
        "inf": good | {"0.bias": np.full_like(good["0.bias"], np.inf)},
    }
    for what, tensors in variants.items():
        with_weights(folder, save(tensors))
        with pytest.raises(PolicyFileError) as caught:
            read_policy(folder)
        assert str(folder) in str(caught.value), what
    for data in (b"", b"\x08\x00\x00\x00\x00\x00\x00\x00{}", pickle.dumps(good), b"\xff" * 64):
        with_weights(folder, data)
        with pytest.raises(PolicyFileError):
            read_policy(folder)
    with_weights(folder, save(good))
    read_policy(folder)


def test_files_that_are_missing_or_too_large_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("policies.card.MAX_WEIGHTS_BYTES", 100)
    with pytest.raises(PolicyFileError, match="larger than the 100 bytes"):
        read_policy(folder)
    monkeypatch.undo()
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(PolicyFileError, match=r"weights\.safetensors: No such file"):
        read_policy(folder)
    with pytest.raises(PolicyFileError, match="No such file"):
        read_policy(folder / "elsewhere")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=8,
)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    entries = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    for key, value in entries:
        found += places(value, (*path, key))
    return found


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), value=JSON)
@example(data=None, value=None)
def test_fuzzed_cards_are_read_or_refused_and_nothing_else(
    folder: Path, data: st.DataObject | None, value: Any
) -> None:
    path = folder / CARD_FILE
    whole = path.read_text()
    document = json.loads(whole)
    if data is not None:
        place = data.draw(st.sampled_from(places(document)))
        put(*place, value)(document)
    path.write_text(json.dumps(document))
    try:
        read_policy(folder)
    except PolicyFileError as error:
        assert "\n" not in str(error)  # noqa: PT017  # most of the fuzz is refused, some is not
    finally:
        path.write_text(whole)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.integers(0, 10**6), what=st.binary(min_size=1, max_size=8), file=st.sampled_from([CARD_FILE, WEIGHTS_FILE])
)
def test_damaged_files_are_read_or_refused_and_nothing_else(folder: Path, at: int, what: bytes, file: str) -> None:
    path = folder / file
    whole = path.read_bytes()
    begin = at % len(whole)
    path.write_bytes(whole[:begin] + what + whole[begin + len(what) :])
    try:
        read_policy(folder)
    except PolicyFileError as error:
        assert "\n" not in str(error)  # noqa: PT017
    finally:
        path.write_bytes(whole)


def test_an_earlier_policy_is_replaced_and_nothing_is_left_beside_it(folder: Path) -> None:
    made = card(name="another")
    export_policy(folder, made, tensors_of(made.network, 1))
    assert read_policy(folder)[0].name == "another"
    assert [entry.name for entry in folder.parent.iterdir()] == ["policy"]


@pytest.mark.parametrize("content", [{"thesis.tex": "x"}, {CARD_FILE: "{}"}, {CARD_FILE: "{}", WEIGHTS_FILE: ""}])
def test_what_is_no_policy_is_not_overwritten(content: dict[str, str], tmp_path: Path) -> None:
    place = tmp_path / "there"
    place.mkdir()
    for name, text in content.items():
        (place / name).write_text(text)
    made = card()
    with pytest.raises(PolicyFileError, match="not overwritten"):
        export_policy(place, made, tensors_of(made.network))
    assert {entry.name: entry.read_text() for entry in place.iterdir()} == content


def test_a_file_or_link_in_its_place_is_left_alone(tmp_path: Path, folder: Path) -> None:
    made = card()
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(folder)
    for name in ("file", "link"):
        with pytest.raises(PolicyFileError, match="no folder"):
            export_policy(tmp_path / name, made, tensors_of(made.network))
    assert read_policy(folder)[0].name == "made-up"


def test_a_failed_export_leaves_the_earlier_policy(folder: Path) -> None:
    made = card(environment="something else")
    with pytest.raises(PolicyFileError):
        export_policy(folder, made, tensors_of(made.network))
    assert read_policy(folder)[0].name == "made-up"
    assert [entry.name for entry in folder.parent.iterdir()] == ["policy"]


def test_a_guard_that_a_card_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match="all of its values"):
        GuardLimits.of(GuardConfig(allowed={"kv_format": ("native",)}))
    config = GuardConfig(allowed={"block_size": ()})
    assert GuardLimits.of(config).config() == config
