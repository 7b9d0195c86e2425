"""How the CPU kernels are compiled: three kinds of function, and a cache on disk that cannot go stale."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import njit
from numba.extending import intrinsic

import kernels.formats.base
import kernels.layout
from kernels.cpu.shared_cache import SharedCache

Function = TypeVar("Function", bound=Callable[..., Any])

# Reassociation lets LLVM vectorise sums. NaN and infinity keep their meaning.
_FAST = {"reassoc", "contract", "nsz"}
_INNER: dict[str, Any] = {"nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def source_stamp() -> int:
    """A number that changes with any source that is compiled into an entry.

    Numba's cache looks at an entry's own file only, and would go on using old code of the functions that it calls.
    Entries are therefore made in functions that take this stamp and mention it: what a closure holds is in the key.
    """
    folder = Path(__file__).parent
    # (The formats themselves are data that kernels are given, but the base's constants are compiled in.)
    sources = [*sorted(folder.glob("*.py")), Path(kernels.layout.__file__), Path(kernels.formats.base.__file__)]
    return zlib.crc32(b"".join(path.read_bytes() for path in sources))


def entry(*, parallel: bool = False) -> Callable[[Function], Function]:
    """Decorator of kernels that Python calls: cached on disk if there is a place for it, runs without the GIL."""
    options: dict[str, Any] = {"nogil": True, "parallel": parallel, "error_model": "numpy", "no_cfunc_wrapper": True}

    def compile_entry(function: Function) -> Function:
        dispatcher = njit(**options)(function)
        # As cache=True does, which takes no other kind of cache.
        with suppress(RuntimeError):  # neither the package's folder nor a user's cache folder can be written
            dispatcher._cache = SharedCache(function)  # type: ignore[no-untyped-call]  # noqa: SLF001
        return cast("Function", dispatcher)

    return compile_entry


# For numba.extending.overload: functions of kernels that differ by what they are given.
OVERLOADED: dict[str, Any] = {"inline": "never", "jit_options": _INNER}


def exact(function: Function) -> Function:
    """Decorator of a function that kernels call, in which every operation is IEEE's."""
    return cast("Function", njit(**_INNER)(function))


def fast(function: Function) -> Function:
    """Decorator of a function that kernels call, whose sums may be reassociated (the same way at every call)."""
    return cast("Function", njit(fastmath=_FAST, **_INNER)(function))


def inlined(function: Function) -> Function:
    """Decorator of a part of a function, which takes the flags of that function.

    For what is called from one place. LLVM optimises a function by itself and then again inside each caller, so that
    every level of functions adds to the time of compilation; pasted parts do not.
    """
    return cast("Function", njit(inline="always")(function))


def lowlevel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a Numba intrinsic; kernels call it without the first argument."""
    return cast("Callable[..., Any]", intrinsic(function))
