"""One reader of files: how a good file is made, and how the product reads it."""

from __future__ import annotations

import contextlib
import io
import json
import resource
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from hypothesis import strategies as st
from mangle import as_json, as_yaml, bitten, mangled, one_line_each

from autotune.cli import app
from autotune.cli._shared import fail_with

JSON: Final = "json"
YAML: Final = "yaml"
LINES: Final = "lines"
"""Every line JSON."""
BYTES: Final = "bytes"
_ROOM_BYTES: Final = 4 << 30
_SAFETENSORS_LENGTH: Final = 8


@dataclass(frozen=True)
class Reader:
    """``make`` puts a good file into an empty folder and returns its path; ``read`` does what the product does with it,
    and may raise ``refusals``, one line each. ``head``: of bytes, how many of them may change. ``examples``: see
    :func:`mangle.examples`.
    """

    name: str
    make: Callable[[Path], Path]
    read: Callable[[Path], object]
    refusals: tuple[type[Exception], ...]
    form: str = BYTES
    head: Callable[[bytes], int] = len
    examples: int = 60

    def bad(self, good: bytes) -> st.SearchStrategy[bytes]:
        """What the file may hold instead."""
        size = self.head(good)
        bites = bitten(good[:size]).map(lambda data: data + good[size:])
        if self.form == JSON:
            return st.one_of(mangled(json.loads(good)).map(as_json), bites)
        if self.form == YAML:
            text = mangled(yaml.safe_load(good)).map(as_yaml)
            return st.one_of(text.map(lambda found: found.encode("utf-8", "surrogatepass")), bites)
        if self.form == LINES:
            return st.one_of(_one_line_mangled(good), bites)
        return st.one_of(bites, st.binary(max_size=200))

    def read_bad(self, path: Path) -> None:
        """Read what may be refused, and check how."""
        try:
            with bounded_memory():
                self.read(path)
        except self.refusals as error:
            problems = getattr(error, "problems", None)
            one_line_each(list(problems) if problems else str(error).splitlines())


def file_with(name: str, content: bytes | str) -> Callable[[Path], Path]:
    """Makes a file of that name with that content."""

    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return make


def verb(*arguments: str) -> int:
    """Run a command line as a shell would: its exit code. What it prints has to be printable, and no traceback."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", errors=how) for how in ("strict", "backslashreplace"))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = fail_with(lambda: app(list(arguments), standalone_mode=False))
        out.flush()
        err.flush()
    said = err.buffer.getvalue().decode()  # type: ignore[attr-defined]  # a BytesIO
    assert "Traceback" not in said, said
    if code:
        one_line_each(said.splitlines() or ["exit code alone"])
    return code


def safetensors_head(data: bytes) -> int:
    """Up to where the file says what is in it; behind that are figures, of which any is good."""
    return _SAFETENSORS_LENGTH + int.from_bytes(data[:_SAFETENSORS_LENGTH], "little")


@contextlib.contextmanager
def bounded_memory() -> Iterator[None]:
    """What asks for far more memory than the file is large does not get it, here as on any machine."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + _ROOM_BYTES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@st.composite
def _one_line_mangled(draw: Callable[..., Any], good: bytes) -> bytes:
    lines = good.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    lines[at] = draw(mangled(json.loads(lines[at])).map(as_json))
    return b"\n".join(lines) + b"\n"
