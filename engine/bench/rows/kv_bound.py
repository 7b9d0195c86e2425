"""A model whose steps are bound by KV: what formats are worth while the pool is no limit, and where it is one."""

from __future__ import annotations

from typing import Any

from engine.bench.context import Context
from engine.bench.engines import build, closed_loop, decode_steps
from engine.bench.shapes import KV_BOUND, make_model, weight_bytes

_BATCH, _PROMPT, _OUTPUT = 16, 1024, 192
_POOL_SEQUENCES = 4  # native ones that the small pool holds


def run(context: Context) -> dict[str, Any]:
    folder = make_model(context.folder / "kv-bound", KV_BOUND)
    steps = 8 if context.quick else 48
    token_bytes = 2 * 2 * KV_BOUND["num_hidden_layers"] * KV_BOUND["num_key_value_heads"] * KV_BOUND["head_dim"]
    result: dict[str, Any] = {"kv_over_weights": round(_BATCH * _PROMPT * token_bytes / weight_bytes(KV_BOUND), 1)}
    step_ns, limited = {}, {}
    for kv_format in context.formats:
        values: dict[str, str | int] = {"kv_format": kv_format, "block_size": 64}
        engine = build(folder, context.now_ns, pool_bytes=1 << 30, values=values)
        step_ns[kv_format] = decode_steps(engine, _BATCH, _PROMPT, steps, settle=8)
        context.log(f"  {kv_format}: {step_ns[kv_format] / 1e3:.0f} us a step, {engine.parts.spent_us(steps)}")
        pool_bytes = int(1.1 * _POOL_SEQUENCES * (_PROMPT + _OUTPUT) * token_bytes)
        small = build(folder, context.now_ns, pool_bytes=pool_bytes, values=values, is_timed=False)
        requests = _BATCH if context.quick else 3 * _BATCH
        limited[kv_format] = closed_loop(small, _BATCH, requests, _PROMPT, _OUTPUT).tokens_per_s
        context.log(f"  {kv_format}, pool of {pool_bytes >> 20} MiB: {limited[kv_format]:.0f} tokens/s")
    result["step_us"] = {name: round(value / 1e3, 1) for name, value in step_ns.items()}
    result["limited_tokens_per_s"] = {name: round(value, 1) for name, value in limited.items()}
    if "native" in step_ns:
        native_ns, native_rate = step_ns["native"], limited["native"]
        result["over_native"] = {name: round(native_ns / value, 3) for name, value in step_ns.items()}
        result["limited_over_native"] = {name: round(value / native_rate, 3) for name, value in limited.items()}
    return {"kv_bound": result}
