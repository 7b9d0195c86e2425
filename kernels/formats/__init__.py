"""Storage formats of the KV cache, one file each: every file here that has a constant ``FORMAT`` is a format.

Layout, memory model, kernels, tunables and the contract suite go over what :func:`declared_formats` finds, so that
adding a file is all that adding a format takes: see ``docs/formats.md``. Import :mod:`kernels.layout`, not this.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable

from kernels.formats.base import CODE_BITS, FormatDeclaration, KVFormat


def declared_formats() -> tuple[KVFormat, ...]:
    """The formats of this folder's files, mildest first; see :func:`ordered_formats`."""
    modules = (importlib.import_module(f"{__name__}.{found.name}") for found in pkgutil.iter_modules(__path__))
    return ordered_formats(module.FORMAT for module in modules if hasattr(module, "FORMAT"))


def ordered_formats(declarations: Iterable[FormatDeclaration]) -> tuple[KVFormat, ...]:
    """Formats by expected loss, each with its place as code and lossiness.

    Raises ValueError for a name or a loss that occurs twice, for bits that no kernel knows, and unless native, the
    only format without codes, comes first.
    """
    ordered = sorted(declarations, key=lambda declaration: declaration.expected_loss)
    for field in ("name", "expected_loss"):
        values = [getattr(declaration, field) for declaration in ordered]
        if len(set(values)) != len(values):
            raise ValueError(f"two formats have the same {field}: {sorted(values)}")
    for place, declaration in enumerate(ordered):
        bits = (declaration.bits_k, declaration.bits_v)
        if not re.fullmatch("[a-z][a-z0-9]*", declaration.name):
            raise ValueError(f"a format's name is lower-case letters and digits, not {declaration.name!r}")
        if (bits == (0, 0)) != (place == 0) or (declaration.name == "native") != (place == 0):
            raise ValueError(f"native, the only format without codes, comes first: {declaration} is at place {place}")
        if place and not set(bits) <= set(CODE_BITS):
            raise ValueError(f"codes have {' or '.join(map(str, CODE_BITS))} bits, not those of {declaration}")
    if not ordered:
        raise ValueError("there is no native format")
    return tuple(
        KVFormat(each.name, place, each.bits_k, each.bits_v, lossiness=place, expected_loss=each.expected_loss)
        for place, each in enumerate(ordered)
    )
