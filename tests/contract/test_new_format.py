"""A new storage format is one file: with it in the registry, the contract suite passes, and nothing else is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels.formats import ordered_formats
from kernels.formats.base import FormatDeclaration
from kernels.layout import FORMATS

ROOT = Path(__file__).resolve().parents[2]
DECLARATION = """
from kernels.formats.base import FormatDeclaration

FORMAT = FormatDeclaration("k4v8", bits_k=4, bits_v=8, expected_loss=0.02)
"""
# The folder's package, with a second folder to look for files in: as if the file lay beside the others.
RUN = """
import importlib.util, sys
import kernels

spec = importlib.util.find_spec("kernels.formats")
spec.submodule_search_locations.append(sys.argv[1])
package = importlib.util.module_from_spec(spec)
sys.modules["kernels.formats"] = kernels.formats = package
spec.loader.exec_module(package)

from engine.tunables import TUNABLES
from kernels.layout import FORMATS

assert [kv_format.name for kv_format in FORMATS] == ["native", "int8", "k8v4", "k4v8", "int4"], FORMATS
assert TUNABLES["kv_format"].values == ("native", "int8", "k8v4", "k4v8", "int4")
import pytest
sys.exit(pytest.main(["-x", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.timeout(600)
def test_one_file_makes_a_format(tmp_path: Path) -> None:
    """Keys of 4 bits and values of 8, between k8v4 and int4: recoding to it raises the bits of k8v4's values."""
    (tmp_path / "k4v8.py").write_text(DECLARATION, encoding="utf-8")
    suite = str(ROOT / "tests/contract/test_format_contract.py")
    triton = {"TRITON_INTERPRET": "1"} if sys.platform == "linux" else {}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), suite, "-k", "k4v8"],
        cwd=ROOT,
        env={**os.environ, **triton, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=580,
    )
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert list(tmp_path.iterdir()) in ([tmp_path / "k4v8.py"], [tmp_path / "__pycache__", tmp_path / "k4v8.py"])


def declared(**changed: object) -> list[FormatDeclaration]:
    fields = {"name": "k4v8", "bits_k": 4, "bits_v": 8, "expected_loss": 0.02, **changed}
    shipped = [FormatDeclaration(each.name, each.bits_k, each.bits_v, each.expected_loss) for each in FORMATS]
    return [FormatDeclaration(**fields), *shipped]  # type: ignore[arg-type]


def test_formats_are_in_order_of_expected_loss() -> None:
    formats = ordered_formats(declared())
    assert [each.name for each in formats] == ["native", "int8", "k8v4", "k4v8", "int4"]
    assert [each.code for each in formats] == [each.lossiness for each in formats] == [0, 1, 2, 3, 4]
    assert ordered_formats(reversed(declared())) == formats
    assert ordered_formats(declared()[1:]) == FORMATS


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"name": "int8"}, "same name"),
        ({"expected_loss": 0.012}, "same expected_loss"),
        ({"bits_v": 3}, "codes have 4 or 8 bits"),
        ({"bits_v": 0}, "codes have 4 or 8 bits"),
        ({"bits_k": 0, "bits_v": 0}, "native, the only format without codes"),
        ({"expected_loss": -0.1}, "comes first"),
        ({"name": "K4V8"}, "lower-case letters"),
        ({"name": ""}, "lower-case letters"),
    ],
)
def test_declarations_that_cannot_be(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ordered_formats(declared(**changed))


def test_no_formats_at_all() -> None:
    with pytest.raises(ValueError, match="no native format"):
        ordered_formats([])
