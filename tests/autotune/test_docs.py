"""The reference pages say what the declarations say."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune import docs
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
