"""CPU kernels: Numba on the arena's bytes, and for prefill torch's products of what was gathered from them."""

from __future__ import annotations

from kernels.cpu.attention_mass import attention_mass
from kernels.cpu.copy_bytes import copy_bytes
from kernels.cpu.decode_attention import decode_attention, plan_decode
from kernels.cpu.gather import gather_kv
from kernels.cpu.prefill_attention import prefill_attention
from kernels.cpu.recode import recode
from kernels.cpu.warm_up import warm_up
from kernels.cpu.write_kv import write_kv

__all__ = [
    "attention_mass",
    "copy_bytes",
    "decode_attention",
    "gather_kv",
    "plan_decode",
    "prefill_attention",
    "recode",
    "warm_up",
    "write_kv",
]
