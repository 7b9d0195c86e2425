"""Whatever a file holds, who reads it either takes it or says in one line per fault what is wrong.

`make fuzz` runs these for longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from journal_readers import READERS as OF_JOURNALS
from mangle import as_yaml, examples, one_line_each
from model_readers import READERS as OF_MODELS
from reader import Reader
from readers import READERS

from policies.rules import RuleError, parse_rules

# What each rule's condition may be made of.
WORDS = [
    "load", "kv_demand", "running", "kv_format", "'int8'", "0.5", "1e308", "-1", "known(", "rank(", "min(", "abs(", ")",
    "(", "+", "-", "*", "/", "**", "<", "<=", "==", "in", "and", "or", "not", ",", "[", "]", "__import__", ".", ":=",
    "lambda:", "if", "else", "'", "\\", "\0", "f'{load}'", "0x10", "1_0", "True", "None", "'int4'", "~", "@", "%", "//",
]  # fmt: skip


@pytest.mark.parametrize("reader", [*READERS, *OF_MODELS, *OF_JOURNALS], ids=lambda reader: reader.name)
def test_whatever_a_file_holds_its_reader_takes_or_refuses_it(reader: Reader, tmp_path: Path) -> None:
    check(reader, tmp_path)


def check(reader: Reader, folder: Path) -> None:
    """Read the good file, and many bad ones in its place."""
    path = reader.make(folder)
    good = path.read_bytes()
    reader.read(path)
    path.write_bytes(good)  # some readers write to what they read

    @examples(reader.examples)
    @given(reader.bad(good))
    def read(data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        reader.read_bad(path)

    read()


@examples()
@given(st.lists(st.sampled_from(WORDS), min_size=1, max_size=40).map(" ".join))
def test_conditions_of_random_words(condition: str) -> None:
    rule = {"name": "r", "when": condition, "set": {"kv_format": "int8"}}
    try:
        parse_rules(as_yaml({"version": 1, "name": "n", "rules": [rule]}))
    except RuleError as error:
        one_line_each(error.problems)
