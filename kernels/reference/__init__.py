"""Every kernel in plain torch, tile by tile: what the others are tested against, and a path of last resort."""

from __future__ import annotations

from kernels.reference.attention_mass import attention_mass
from kernels.reference.copy_bytes import copy_bytes
from kernels.reference.decode_attention import decode_attention, plan_decode
from kernels.reference.gather import gather_kv
from kernels.reference.prefill_attention import prefill_attention
from kernels.reference.recode import recode
from kernels.reference.write_kv import write_kv

__all__ = [
    "attention_mass",
    "copy_bytes",
    "decode_attention",
    "gather_kv",
    "plan_decode",
    "prefill_attention",
    "recode",
    "write_kv",
]
