"""Two processes that compile one kernel at once leave a cache in which each signature has its own code."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numba
import pytest
from numba.core.caching import FunctionCache, IndexDataCacheFile

from kernels.cpu.compile import entry
from kernels.cpu.shared_cache import SharedCache


def double(x: float) -> float:
    return 2 * x


def cache(kind: Any) -> Any:
    return kind(double)


def loaded(cache: Any, compiled: Any) -> list[str]:
    """What the cache gives for each signature that was compiled."""
    found = [cache.load_overload(args, compiled.targetctx) for args in compiled.overloads]
    return ["nothing" if one is None else str(one.signature.args) for one in found]


def saved_at_once(kind: type[FunctionCache], compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second save begins while the first one has read the index and not written it yet."""
    (first, code), (second, other) = compiled.overloads.items()
    beside = threading.Thread(target=lambda: cache(kind).save_overload(second, other))
    read: Any = IndexDataCacheFile._load_index

    def read_index(file: IndexDataCacheFile) -> Any:
        index = read(file)
        if threading.current_thread() is threading.main_thread():
            beside.start()
            beside.join(0.3)  # as far as it comes
        return index

    with monkeypatch.context() as patched:
        patched.setattr(IndexDataCacheFile, "_load_index", read_index)
        cache(kind).save_overload(first, code)
        beside.join()


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    function: Any = entry()(double)
    assert (function(1), function(0.5)) == (2, 1.0)
    function._cache.flush()
    assert loaded(function._cache, function) == ["nothing", "nothing"]
    return function


def test_each_signature_keeps_its_own_code(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(compiled._cache) is SharedCache
    saved_at_once(SharedCache, compiled, monkeypatch)
    assert loaded(cache(SharedCache), compiled) == ["(int64,)", "(float64,)"]


def test_numbas_own_cache_loses_one(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Why there is another one. Once this fails, numba's own will do."""
    saved_at_once(FunctionCache, compiled, monkeypatch)
    assert loaded(cache(FunctionCache), compiled) != ["(int64,)", "(float64,)"]


def test_without_a_lock_it_goes_on(compiled: Any) -> None:
    (first, code), _ = compiled.overloads.items()
    own = cache(SharedCache)
    lock = Path(own.cache_path) / "kernels.lock"
    lock.unlink()
    lock.mkdir()  # what cannot be opened as a file
    own.save_overload(first, code)
    assert loaded(own, compiled) == ["(int64,)", "nothing"]
