"""The reference pages say what the declarations say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from autotune import docs
from autotune.config_page import configuration_page
from autotune.venv_check import foreign_owners

ROOT = Path(docs.__file__).parents[1]


@pytest.mark.parametrize("name", sorted(docs.pages()))
def test_generated_page_is_current(name: str) -> None:
    assert (ROOT / name).read_text(encoding="utf-8") == docs.pages()[name], "run python -m autotune.docs"


def test_check_notices_an_outdated_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "docs").mkdir()
    assert docs.main(["--root", str(tmp_path)]) == 0
    assert docs.main(["--root", str(tmp_path), "--check"]) == 0
    (tmp_path / "docs/tunables.md").write_text("old", encoding="utf-8")
    assert docs.main(["--root", str(tmp_path), "--check"]) == 1
    assert "docs/tunables.md: out of date" in capsys.readouterr().out


def test_a_foreign_package_of_our_import_name_is_refused() -> None:
    owners = {"kernels": ["kv-autotune", "kernels"], "engine": ["kv-autotune"]}
    assert foreign_owners(owners) == [
        "the distribution 'kernels' also provides the package 'kernels': uninstall it here",
    ]
    assert foreign_owners({"kernels": ["kv-autotune"]}) == []


ROW = re.compile(r"^\| ([A-M]\.\d+) \| ([\w./-]+#\d+) \| [^|]+ \| ((?:`tests/[\w/.]+::\w+` ?)+)\|$")
CASES = ROOT.parent / "shared/cases/README.md"


def cases() -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Case, report, and (file, function) of its tests, by the table of docs/testing.md."""
    text = (ROOT / "docs/testing.md").read_text(encoding="utf-8").partition("## Cases")[2]
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    rows = [ROW.match(line) for line in lines]
    assert all(rows), [line[:80] for line, row in zip(lines, rows, strict=True) if row is None]
    return [
        (row[1], row[2], re.findall(r"`(tests/[\w/.]+)::(\w+)`", row[3]))
        for row in rows
        if row is not None
    ]  # fmt: skip


@pytest.mark.parametrize(("case", "report", "tests"), cases(), ids=[row[0] for row in cases()])
def test_every_case_has_tests_that_name_it(case: str, report: str, tests: list[tuple[str, str]]) -> None:
    for file, name in tests:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        found = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name]
        assert len(found) == 1, f"{file}::{name}"
        told = ast.get_docstring(found[0]) or ""
        assert re.search(rf"\b{re.escape(case)}\b", told) or report.rpartition("/")[2] in told, f"{file}::{name}"


@pytest.mark.skipif(not CASES.exists(), reason="../shared/cases is not here")
def test_no_case_is_left_out() -> None:
    wanted, section = {}, ""
    for line in CASES.read_text(encoding="utf-8").splitlines():
        if heading := re.match(r"## ([A-M])\. ", line):
            section = heading[1]
        elif section and (entry := re.match(r"(\d+)\. ([\w./-]+#\d+)", line)):
            wanted[f"{section}.{entry[1]}"] = entry[2]
    assert len(wanted) > 30
    assert {case: report for case, report, _ in cases()} == wanted


def test_every_key_of_the_configuration_says_what_it_is_for() -> None:
    rows = re.findall(r"^\| `([\w.]+)` \| `.+` \| .+ \| (.*) \|$", configuration_page(), re.MULTILINE)
    assert len(rows) > 50
    assert [key for key, told in rows if told.removeprefix("*restart* ") in {"", "None"}] == []
