"""Share of attention of a prompt's last queries; not on the GPU yet."""

from __future__ import annotations


def attention_mass(*_: object, **__: object) -> None:
    """See :func:`kernels.ops.attention_mass`."""
    raise NotImplementedError("attention mass on the GPU")
