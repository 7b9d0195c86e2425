"""Where the product parses what it did not write: found in its source, not listed."""

from __future__ import annotations

import ast
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Self

ROOT: Final = Path(__file__).parents[2]
FOLDERS: Final = ("autotune", "policies", "envs", "engine", "kernels")
# Tools for who develops or measures it: their inputs are their own outputs, and what a developer points them at.
TOOLS: Final = (
    "autotune/bench/", "autotune/demo/", "autotune/docs.py", "autotune/evidence/", "autotune/grafana",
    "engine/bench", "engine/bundled/", "engine/cache_bench/", "envs/bench_", "kernels/", "policies/bench_",
)  # fmt: skip
# What reads or parses, by the last two parts of its name.
_FUNCTIONS: Final = frozenset(
    """
    load_json load_yaml load_strict json.load json.loads yaml.load yaml.safe_load csv.reader csv.DictReader gzip.open
    gzip.decompress gzip.GzipFile np.load numpy.load torch.load safe_open sqlite3.connect zipfile.ZipFile pickle.load
    pickle.loads text_string_to_metric_families tomllib.load tomllib.loads request.urlopen Tokenizer.from_file
    ast.literal_eval ElementTree.parse ElementTree.fromstring marshal.loads
    """.split()
)
_METHODS: Final = frozenset("read_text read_bytes model_validate_json getresponse from_string".split())
_OPEN: Final = "open"


def parsing(root: Path = ROOT) -> dict[str, int]:
    """Every function that parses, ``autotune/config.py::_text_of``, with its line. Modules' own bodies are left out:
    what they read lies in the package.
    """
    found: dict[str, int] = {}
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            name = path.relative_to(root).as_posix()
            if not name.startswith(TOOLS):
                found |= {f"{name}::{function}": line for function, line in _in(ast.parse(path.read_text()))}
    return found


def _in(tree: ast.AST, names: tuple[str, ...] = ()) -> Iterator[tuple[str, int]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _in(node, (*names, node.name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if any(_parses(inner) for inner in _own(node)):
                yield ".".join((*names, node.name)), node.lineno
            yield from _in(node, (*names, node.name, "<locals>"))
        else:
            yield from _in(node, names)


def _own(function: ast.AST) -> Iterator[ast.AST]:
    """What is in a function, without the functions in it."""
    for node in ast.iter_child_nodes(function):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node
            yield from _own(node)


def _parses(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    parts = ast.unparse(node.func).split(".")
    if parts[-1] == _OPEN:
        return parts[0] != "os" and not _writes(node, positional=len(parts) == 1)
    return parts[-1] in _METHODS or ".".join(parts[-2:]) in _FUNCTIONS or parts[-1] in _FUNCTIONS


def _writes(call: ast.Call, *, positional: bool) -> bool:
    """``open(path, "w")`` and ``path.open("w")``; without a mode it reads."""
    given = [*call.args[1 if positional else 0 :], *(word.value for word in call.keywords if word.arg == "mode")]
    modes = [word.value for word in given if isinstance(word, ast.Constant) and isinstance(word.value, str)]
    return bool(modes) and bool(set(modes[0]) & set("wax"))


class Reached:
    """Which functions of the product were entered while it was open, in any thread. Use it in ``with``."""

    def __init__(self) -> None:
        self.functions: set[str] = set()
        self._seen: set[Any] = set()

    def __enter__(self) -> Self:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as its documentation says

    def _note(self, frame: Any, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in self._seen:
            return
        self._seen.add(code)
        name = code.co_filename
        if name.startswith(str(ROOT)):
            self.functions.add(f"{Path(name).relative_to(ROOT).as_posix()}::{code.co_qualname}")
