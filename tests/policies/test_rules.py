"""Rule files: every fault is one line with its path, and a good file says what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from policies.rules import RuleError, load_rules, parse_rules, presets

GOOD = """
version: 1
name: mine
otherwise: {kv_format: native}
dwell: 1m
rules:
  - name: low
    when: load > 0.5
    set: {block_size: 64}
  - name: high
    because: memory runs out
    priority: 5
    when: kv_usage > 0.8
    for: 1.5s
    release: kv_usage < 0.5
    release_for: 500ms
    set: {kv_format: int4, block_size: 32}
"""


def test_a_good_file() -> None:
    rules = parse_rules(GOOD)
    assert (rules.name, rules.dwell_s, rules.otherwise) == ("mine", 60.0, (("kv_format", "native"),))
    high, low = rules.rules  # by priority
    assert (high.name, high.for_s, high.release_for_s, high.because) == ("high", 1.5, 0.5, "memory runs out")
    assert high.sets == (("kv_format", "int4"), ("block_size", 32))
    assert (low.name, low.because, low.release) == ("low", "low", None)


def problems(text: str) -> list[str]:
    with pytest.raises(RuleError) as error:
        parse_rules(text)
    assert all("\n" not in problem for problem in error.value.problems)
    return error.value.problems


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("version: 1", "version: 2", "version: must be 1, got 2"),
        ("version: 1\n", "", "version: must be 1, got None"),
        ("name: mine", "name: My Rules", "name: must be 1 to 40 of a-z"),
        ("name: low", "name: high", "rules[1].name: 'high' is taken by an earlier rule"),
        ("load > 0.5", "lod > 0.5", "rules[0].when: unknown name 'lod'"),
        ("    when: load > 0.5\n", "", "rules[0].when: expected a condition"),
        ("release: kv_usage < 0.5", "release: kv_usage", "rules[1].release: 'kv_usage' is a number"),
        ("block_size: 64", "block_size: 48", "rules[0].set.block_size: 48 is not allowed; choose one of 16"),
        ("block_size: 64", "block: 64", "rules[0].set.block: unknown tunable 'block'"),
        ("{block_size: 64}", "{}", "rules[0].set: must set at least one knob"),
        ("{block_size: 64}", "64", "rules[0].set: must be a mapping of knobs"),
        ("    set: {block_size: 64}\n", "", "rules[0].set: must be a mapping of knobs"),
        ("for: 1.5s", "for: soon", "rules[1].for: must be a duration"),
        ("for: 1.5s", "for: -3", "rules[1].for: must be a duration"),
        ("release_for: 500ms", "release_for: 2000h", "rules[1].release_for: must be a duration"),
        ("dwell: 1m", "dwell: true", "dwell: must be a duration"),
        ("priority: 5", "priority: high", "rules[1].priority: must be a whole number"),
        ("because: memory runs out", "because: [x]", "rules[1].because: must be text"),
        ("priority: 5", "prio: 5", "rules[1].prio: unknown key; known: name"),
        ("otherwise: {kv_format: native}", "otherwise: {kv_format: fp8}", "otherwise.kv_format: 'fp8' is not allowed"),
        ("dwell: 1m", "dwel: 1m", "dwel: unknown key; known: version"),
        ("dwell: 1m", "dwell: 1m\ndwell: 2m", "not valid YAML at line 6, column 1: key 'dwell' is given twice"),
        ("dwell: 1m", "dwell: [", "not valid YAML at line 7"),
        (
            "dwell: 1m",
            "dwell: !!python/object:os.system x",
            "not valid YAML at line 5, column 8: could not determine a constructor",
        ),
    ],
)
def test_faults_have_a_path(old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    assert any(problem.startswith(complaint) for problem in problems(GOOD.replace(old, new, 1)))


def test_all_faults_are_told_at_once() -> None:
    bad = GOOD.replace("load >", "lod >").replace("for: 1.5s", "for: soon").replace("dwell: 1m", "dwell: x")
    assert [problem.split(":")[0] for problem in problems(bad)] == ["rules[0].when", "rules[1].for", "dwell"]


@pytest.mark.parametrize(
    "text",
    ["", "3", "[]", "rules: 3", "rules: []", "version: 1\nname: a\nrules: [3]", "a: b: c", "version: 2026-13-45"],
)
def test_what_is_no_rule_file_is_refused(text: str) -> None:
    assert problems(text)


def test_words_that_yaml_takes_for_booleans_stay_words() -> None:
    assert problems(GOOD.replace("name: mine", "name: off").replace("version: 1", "version: 2")) == [
        "version: must be 1, got 2"
    ]


def test_files_and_presets(tmp_path: Path) -> None:
    assert {"default", "literature"} <= set(presets())
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD, encoding="utf-8")
    assert load_rules(path).name == "mine"
    path.write_text(GOOD.replace("load >", "lod >"), encoding="utf-8")
    with pytest.raises(RuleError, match=r"mine\.yaml: rules\[0\]\.when: unknown name 'lod'"):
        load_rules(str(path))
    with pytest.raises(RuleError, match=r"nowhere\.yaml: No such file or directory; .* preset \(default, literature\)"):
        load_rules(tmp_path / "nowhere.yaml")
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(RuleError, match=r"mine\.yaml"):
        load_rules(path)
    with pytest.raises(RuleError, match="embedded null byte"):
        load_rules("a\0b")


def test_a_problem_is_one_line_whatever_the_file_quotes() -> None:
    with pytest.raises(RuleError) as caught:
        parse_rules('version: {"a\\nb": "' + "x" * 5000 + '"}\nname: n\nrules: []\n')
    assert all("\n" not in problem and len(problem) <= 1000 for problem in caught.value.problems)
