"""SGLang (with ``--enable-metrics``): its KV settings are fixed at its start, and ``/server_info`` tells them.

Its ``/pause_generation`` throws running requests away or stops them where they are: it is no way to drain. On SIGTERM
it finishes what it has by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from autotune.adapters.base import Flag
from autotune.adapters.kinds import Asked, EngineKind, parsed, whole
from autotune.adapters.names import SGLANG as NAMES
from autotune.adapters.page import View
from autotune.adapters.reading import Told
from autotune.adapters.web import Web
from engine.control_client import EngineUnreachable
from engine.tunables import CostClass, Tunable
from policies.restart_advice import Storage

_TUNABLES: Final = {
    "kv-cache-dtype": Tunable(
        "kv-cache-dtype",
        ("auto", "fp8_e4m3", "fp8_e5m2"),
        "auto",
        "",
        CostClass.RESTART,
        "Storage of KV: the model's own type, or 8-bit floats.",
    ),
    "page-size": Tunable("page-size", (1, 16, 32, 64, 128), 1, "tokens", CostClass.RESTART, "Tokens per KV page."),
}


def _ask(web: Web) -> Asked:
    info = _server_info(web)
    if not info:
        return Asked()
    found = {"kv-cache-dtype": info.get("kv_cache_dtype"), "page-size": info.get("page_size")}
    model = str(info.get("served_model_name") or info.get("model_path") or "")
    told = Told(
        model,
        parsed(_TUNABLES, found),
        slots=whole(info.get("max_running_requests")),
        max_model_len=whole(info.get("context_length")),
        capacity_tokens=whole(info.get("max_total_num_tokens")),
    )
    return Asked(str(info.get("version", "")), told)


def _server_info(web: Web) -> Mapping[str, Any]:
    for path in ("/server_info", "/get_server_info"):  # the newer one first
        try:
            return web.json(path)
        except EngineUnreachable:
            continue
    return {}


def _on_page(view: View) -> Told:
    page_size = view.total("sglang:page_size")
    found = {} if page_size is None else {"page-size": round(page_size)}
    model = next((sample.labels.get("model_name", "") for sample in view.samples(*NAMES.gauges["running"])), "")
    return Told(model, parsed(_TUNABLES, found))


SGLANG: Final = EngineKind(
    name="sglang",
    names=NAMES,
    tunables=_TUNABLES,
    flags={"kv-cache-dtype": Flag("--kv-cache-dtype"), "page-size": Flag("--page-size")},
    storage={
        "auto": Storage(16, "native"),
        "fp8_e4m3": Storage(8, "int8"),
        "fp8_e5m2": Storage(8, "int8"),
    },
    kv_knobs=("kv-cache-dtype",),
    ask=_ask,
    on_page=_on_page,
)
