"""llama.cpp's server (with ``--metrics``): KV types and slots are fixed at its start.

It tells its slots (``/props``) but not its KV types: they are read off its command line and environment, where it runs
on this machine as a user whose processes may be looked at. Where slots were asked for, memory is set aside for each
when it starts, so that more requests fit only with more slots: those are a knob then, and the context of each is kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from autotune.adapters.base import Flag
from autotune.adapters.kinds import Asked, EngineKind, parsed, whole
from autotune.adapters.names import LLAMACPP as NAMES
from autotune.adapters.page import View
from autotune.adapters.process import LOCAL, Process, listener, value_of
from autotune.adapters.reading import Told
from autotune.adapters.web import Web
from engine.control_client import EngineUnreachable
from engine.tunables import CostClass, Tunable, TunableValue
from policies.restart_advice import Storage

_TYPES: Final = ("f16", "q8_0", "q4_0")
_K: Final = Flag("--cache-type-k", "LLAMA_ARG_CACHE_TYPE_K")
_V: Final = Flag("--cache-type-v", "LLAMA_ARG_CACHE_TYPE_V")
_SLOTS: Final = Flag("--parallel", "LLAMA_ARG_N_PARALLEL")
_CONTEXT: Final = Flag("--ctx-size", "LLAMA_ARG_CTX_SIZE")
_MOST_SLOTS: Final = 256
_TUNABLES: Final = {
    "cache-type-k": Tunable("cache-type-k", _TYPES, "f16", "", CostClass.RESTART, "Storage of keys."),
    "cache-type-v": Tunable(
        "cache-type-v", _TYPES, "f16", "", CostClass.RESTART, "Storage of values; other than f16 needs flash attention."
    ),
    "parallel": Tunable(
        "parallel",
        tuple(range(1, _MOST_SLOTS + 1)),
        1,
        "slots",
        CostClass.RESTART,
        "Requests at once. Every slot keeps its context, so the total context moves with it.",
    ),
}


def _ask(web: Web) -> Asked:
    try:
        props: Mapping[str, Any] = web.json("/props")
    except EngineUnreachable:
        return Asked()
    slots = whole(props.get("total_slots"))
    settings = props.get("default_generation_settings")
    context = whole(settings.get("n_ctx")) if isinstance(settings, Mapping) else None
    found: dict[str, object] = {}
    process = listener(web.port) if web.host in LOCAL else None
    if process is not None:
        found["cache-type-k"] = value_of(process, ("-ctk", _K.argument), _K.variable, "f16")
        found["cache-type-v"] = value_of(process, ("-ctv", _V.argument), _V.variable, "f16")
        if _sets_slots_aside(process):
            found["parallel"] = slots
    model = str(props.get("model_alias") or props.get("model_path") or "").rpartition("/")[2]
    capacity = None if slots is None or context is None else slots * context
    told = Told(model, parsed(_TUNABLES, found), slots=slots, max_model_len=context, capacity_tokens=capacity)
    return Asked(str(props.get("build_info", "")), told)


def _sets_slots_aside(process: Process) -> bool:
    """Whether each slot has memory of its own: slots were asked for, and one cache for all was not."""
    asked = value_of(process, ("-np", _SLOTS.argument), _SLOTS.variable, "-1")
    shared = value_of(process, (), "LLAMA_ARG_KV_UNIFIED", "0")
    is_unified = shared not in {"0", "false", "off"} or bool({"-kvu", "--kv-unified"} & set(process.arguments))
    return whole(asked) is not None and not is_unified


def _on_page(_: View) -> Told:
    return Told()


def _context(values: Mapping[str, TunableValue], told: Told) -> dict[Flag, str]:
    """As many slots as asked for, each with the context that it has."""
    slots = values.get("parallel")
    if slots is None:
        return {}
    if told.max_model_len is None:
        raise ValueError("the server does not tell the context of a slot, which must be kept")
    return {_CONTEXT: str(int(slots) * told.max_model_len)}


LLAMACPP: Final = EngineKind(
    name="llamacpp",
    names=NAMES,
    tunables=_TUNABLES,
    flags={"cache-type-k": _K, "cache-type-v": _V, "parallel": _SLOTS},
    # Blocks of 32 values with one 16-bit scale.
    storage={"f16": Storage(16, "native"), "q8_0": Storage(8.5, "int8"), "q4_0": Storage(4.5, "int4")},
    kv_knobs=("cache-type-k", "cache-type-v"),
    slot_knob="parallel",
    ask=_ask,
    on_page=_on_page,
    besides=_context,
)
