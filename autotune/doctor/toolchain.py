"""What Triton needs to compile its launchers when an engine starts on a GPU: a C compiler and Python's headers."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Final

from autotune.doctor.device import driver_version, nvidia_devices
from autotune.doctor.finding import Finding, ok, problem
from autotune.doctor.probes import Probes

_COMPILERS: Final = ("cc", "gcc", "clang")
_USED: Final = re.compile(r"\s*([^\s]+)")


def check_compiler(probes: Probes) -> Iterator[Finding]:
    """``$CC``, else cc, gcc or clang."""
    named = _USED.match(probes.environ.get("CC", ""))
    names = (named[1],) if named else _COMPILERS
    found = next((path for name in names if (path := probes.which(name))), None)
    if found is not None:
        yield ok("compiler", found)
        return
    what = f"CC names {names[0]}, which is not there" if named else f"none of {', '.join(_COMPILERS)}"
    yield _missing("compiler", what, "install gcc (Debian: apt install gcc), or set CC", probes)


def check_headers(probes: Probes) -> Iterator[Finding]:
    """``Python.h`` of this interpreter."""
    if probes.stat(probes.include / "Python.h") is not None:
        yield ok("Python headers", str(probes.include))
        return
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    yield _missing(
        "Python headers",
        f"{probes.include} has no Python.h",
        f"install them (Debian: apt install python{version}-dev)",
        probes,
    )


def check_triton(probes: Probes) -> Iterator[Finding]:
    """Triton beside a torch that uses a GPU."""
    facts = probes.torch()
    if facts.is_available and facts.triton is None:
        yield problem("Triton", "cannot be imported", "install it again: pip install 'kv-autotune[engine]'")
    elif facts.triton is not None:
        yield ok("Triton", facts.triton)


def _missing(check: str, found: str, advice: str, probes: Probes) -> Finding:
    """A problem where a GPU is there: Triton compiles at the first start. Without one nothing needs it."""
    if nvidia_devices(probes) or driver_version(probes) is not None:
        return problem(check, f"{found}; Triton needs it on a GPU", advice)
    return ok(check, f"{found}; only needed on a GPU")
