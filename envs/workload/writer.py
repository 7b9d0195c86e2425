"""Write requests in the plain form, one row at a time: a trace of weeks takes no more memory than one of seconds."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from envs.workload.trace import TraceError, TraceRequest


def write_trace(path: Path, requests: Iterable[TraceRequest], *, block_tokens: float = 0.0, force: bool = False) -> int:
    """Write all requests and return their number; gzip when the name ends in ``.gz``.

    ``block_tokens``: as of the trace; ids are left out when it is 0 or no whole number of bytes / 4. The file appears
    under its name when it is whole. Raises TraceError when it exists (unless ``force``) or cannot be written.
    """
    if path.exists() and not force:
        raise TraceError(f"{path}: exists already; name another file, or --force")
    if path.exists() and not path.is_file():
        raise TraceError(f"{path}: is no plain file; name another")
    part = path.with_name(f"{path.name}.part")
    column = _hash_column(block_tokens)
    number = 0
    try:
        with _open(part, packed=path.suffix == ".gz") as stream:
            stream.write("arrival_s,prompt_tokens,output_tokens,source" + (f",{column}" if column else "") + "\n")
            for request in requests:
                row = f"{request.arrival_s:.6f},{request.prompt_tokens},{request.output_tokens},{_cell(request.source)}"
                if column:
                    row += "," + " ".join(map(str, request.hash_ids))
                stream.write(row + "\n")
                number += 1
        os.replace(part, path)  # noqa: PTH105
    except OSError as error:
        raise TraceError(f"{path}: cannot be written: {error.strerror}") from None
    finally:
        part.unlink(missing_ok=True)
    return number


@contextmanager
def _open(path: Path, *, packed: bool) -> Iterator[IO[str]]:
    if not packed:
        with path.open("w", encoding="utf-8", newline="") as plain:
            yield plain
        return
    # No name and time of writing in the header: the same requests make the same bytes.
    with (
        path.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0, compresslevel=6) as binary,
        io.TextIOWrapper(binary, encoding="utf-8", newline="") as text,
    ):
        yield text


def _hash_column(block_tokens: float) -> str | None:
    """Blocks of whole tokens, or of whole bytes where a trace was scaled; None: cannot be said in this form."""
    if block_tokens and block_tokens == int(block_tokens):
        return f"hash_ids_b{int(block_tokens)}"
    return (
        f"hash_ids_b{round(block_tokens * 4)}bytes"
        if block_tokens and block_tokens * 4 == round(block_tokens * 4)
        else None
    )


def _cell(text: str) -> str:
    if not any(character in text for character in ',"\r\n'):
        return text
    return '"' + text.replace('"', '""') + '"'
