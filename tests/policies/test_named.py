"""Policies by their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.named import KINDS, bundled, contender, is_budgeted, read_from, static_name
from policies.rules import presets


def test_names_that_mean_something(tmp_path: Path) -> None:
    assert contender("none").policy is None
    static = contender("static:kv_format=int4, block_size=64")
    assert static.values == {"kv_format": "int4", "block_size": 64}
    assert contender(static_name(static.values)).values == static.values
    assert static_name({}) == "none"
    rules = tmp_path / "own.yaml"
    rules.write_text("version: 1\nname: own\nrules: [{name: r, when: load > 0.5, set: {kv_format: int8}}]\n")
    assert contender(str(rules)).policy is not None
    assert all(contender(name).policy is not None for name in bundled() if name != "predictor")


def test_a_contender_may_be_run_without_the_quality_budget(tmp_path: Path) -> None:
    assert contender("default").budgeted
    assert not contender("literature").budgeted
    free = contender("unbudgeted:default")
    assert (free.name, free.budgeted) == ("unbudgeted:default", False)
    assert free.policy is not None
    rules = tmp_path / "own.yaml"
    rules.write_text("version: 1\nname: own\nrules: [{name: r, when: load > 0.5, set: {kv_format: int8}}]\n")
    assert is_budgeted(str(rules))
    assert contender(str(rules)).budgeted
    assert not is_budgeted(f"unbudgeted:{rules}")
    assert not contender(f"unbudgeted:{rules}").budgeted


@pytest.mark.parametrize(
    "text",
    [
        "unbudgeted:",
        "unbudgeted:unbudgeted:default",
        "unbudgeted:nowhere",
        "none:x",
        "static:",
        "static:kv_format",
        "static:kv_format=int3",
        "static:kv_format=int8, kv_format=int4",
        "nowhere.yaml",
        "now\nhere",
        "x" * 400,
        "",
    ],
)
def test_mistakes_are_one_line(text: str) -> None:
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        contender(text)


def test_what_is_unknown_is_answered_with_every_kind() -> None:
    """Not with the presets alone, which are only some of what could have been meant."""
    with pytest.raises(ValueError, match="no such rules file") as caught:
        contender("predicter")
    for kind in (*KINDS, *presets()):
        assert kind in str(caught.value)


def test_files_that_a_name_reads_are_known() -> None:
    assert read_from("own.yaml") == read_from("unbudgeted:own.yaml") == [Path("own.yaml")]
    assert read_from("learned:a") == [Path("a/card.json"), Path("a/weights.safetensors")]
    for name in ("none", "default", "predictor", "auto", "static:kv_format=int8", "unbudgeted:default"):
        assert not read_from(name)
