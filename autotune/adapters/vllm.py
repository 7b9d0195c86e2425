"""vLLM: its KV settings are fixed at its start, and its page tells them (``vllm:cache_config_info``)."""

from __future__ import annotations

from typing import Final

from autotune.adapters.base import Flag
from autotune.adapters.kinds import Asked, EngineKind, parsed, whole
from autotune.adapters.names import VLLM as NAMES
from autotune.adapters.page import View
from autotune.adapters.reading import Told
from autotune.adapters.web import Web
from engine.control_client import EngineUnreachable
from engine.tunables import CostClass, Tunable
from policies.restart_advice import Storage

_INFO: Final = "vllm:cache_config_info"
_TUNABLES: Final = {
    "kv-cache-dtype": Tunable(
        "kv-cache-dtype",
        ("auto", "fp8", "fp8_e4m3", "fp8_e5m2"),
        "auto",
        "",
        CostClass.RESTART,
        "Storage of KV: the model's own type, or 8-bit floats.",
    ),
    "block-size": Tunable("block-size", (16, 32, 64, 128), 16, "tokens", CostClass.RESTART, "Tokens per KV block."),
}


def _ask(web: Web) -> Asked:
    try:
        return Asked(version=str(web.json("/version").get("version", "")))
    except EngineUnreachable:
        return Asked()


def _on_page(view: View) -> Told:
    found = {
        "kv-cache-dtype": view.label(_INFO, "cache_dtype"),
        "block-size": view.label(_INFO, "block_size"),
    }
    tokens = whole(view.label(_INFO, "kv_cache_size_tokens"))
    blocks, size = whole(view.label(_INFO, "num_gpu_blocks")), whole(view.label(_INFO, "block_size"))
    if tokens is None and blocks is not None and size is not None:
        tokens = blocks * size  # before the page told it; too much for models with several kinds of layers
    model = next((sample.labels.get("model_name", "") for sample in view.samples(*NAMES.gauges["running"])), "")
    return Told(model, parsed(_TUNABLES, found), capacity_tokens=tokens)


VLLM: Final = EngineKind(
    name="vllm",
    names=NAMES,
    tunables=_TUNABLES,
    flags={"kv-cache-dtype": Flag("--kv-cache-dtype"), "block-size": Flag("--block-size")},
    # auto: 16 bits for almost every model; fp8 as lossy as our int8, by published figures.
    storage={
        "auto": Storage(16, "native"),
        "fp8": Storage(8, "int8"),
        "fp8_e4m3": Storage(8, "int8"),
        "fp8_e5m2": Storage(8, "int8"),
    },
    kv_knobs=("kv-cache-dtype",),
    ask=_ask,
    on_page=_on_page,
    # Only with VLLM_SERVER_DEV_MODE=1; older versions know the second word alone, and abort without either.
    pause="/pause?mode=wait&wait_for_inflight_requests=true&clear_cache=false",
    resume="/resume",
)
