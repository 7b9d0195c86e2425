"""Reference of :func:`kernels.ops.recode`."""

from __future__ import annotations

import torch

from kernels.layout import (
    FORMATS,
    JOB_DST_FORMAT,
    JOB_DST_OFFSET,
    JOB_DST_TILE,
    JOB_SRC2_OFFSET,
    JOB_SRC2_TILE,
    JOB_SRC_FORMAT,
    JOB_SRC_OFFSET,
    JOB_SRC_TILE,
    KVShape,
)
from kernels.reference.tiles import native_dtype_of, tile_parts, tile_view


def recode(arena: torch.Tensor, shape: KVShape, jobs: torch.Tensor, *, native_dtype: torch.dtype | None = None) -> None:
    """Fill each job's destination tile, all layers; see :func:`kernels.ops.recode`.

    Same format: bytes are copied. Keys or values whose number of bits does not change (int8 to k8v4: keys) are copied
    too; the others are dequantised in float32 and quantised again.
    """
    element = native_dtype_of(shape, native_dtype)
    for job in jobs.tolist():
        target, source = FORMATS[job[JOB_DST_FORMAT]], FORMATS[job[JOB_SRC_FORMAT]]
        destination = tile_view(arena, shape, target, job[JOB_DST_OFFSET], job[JOB_DST_TILE])
        first = tile_view(arena, shape, source, job[JOB_SRC_OFFSET], job[JOB_SRC_TILE])
        if target is source:
            destination.copy_(first)
            continue
        if target.lossiness < source.lossiness:
            raise ValueError(f"cannot recode {source.name} to {target.name}: lost precision does not come back")
        sources = [first]
        if source.is_native:
            sources.append(tile_view(arena, shape, source, job[JOB_SRC2_OFFSET], job[JOB_SRC2_TILE]))
        origins = [tile_parts(view, shape, source, element) for view in sources]
        for which, part in enumerate(tile_parts(destination, shape, target, element)):
            if part.bits == origins[0][which].bits:
                part.copy_from(origins[0][which])
            else:
                part.quantise(torch.cat([origin[which].read(source.tile_tokens) for origin in origins], dim=-2))
