"""The same for what training reads: a run of unknown origin is taken or refused, in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("sb3_contrib", reason="the extra 'train' is not installed")
pytest.importorskip("torch", reason="the extra 'train' is not installed")

from reader import Reader
from test_files import check
from train_readers import READERS


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_whatever_a_run_holds_it_is_taken_or_refused(reader: Reader, tmp_path: Path) -> None:
    check(reader, tmp_path)
