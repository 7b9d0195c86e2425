"""Says in one line when another package has taken the place of one of ours, before it is imported. Stdlib only.

Our import names are common words: a folder ``envs/`` that Python looks into first would be imported in place of ours,
and end in a traceback that says nothing.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from importlib.machinery import ModuleSpec
from pathlib import Path

from autotune.venv_check import OUR_PACKAGES


def shadows(home: Path, find: Callable[[str], ModuleSpec | None] = importlib.util.find_spec) -> Iterator[str]:
    """One line for each of our packages that is found outside of ``home``, the folder that ours are in."""
    for package in OUR_PACKAGES:
        spec = find(package)
        origin = None if spec is None else spec.origin
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        found = Path(origin).parent if origin is not None and places else Path(origin or (places or [""])[0])
        if spec is None or found.resolve().parent != home:
            where = "not to be found" if spec is None else f"found at {found}"
            yield (
                f"our package {package!r} is {where} instead of in {home}: start from another folder, or take what is "
                "in its way off PYTHONPATH"
            )
