"""The engine's command line, and the options that it stands for. No torch."""

from __future__ import annotations

import argparse
from pathlib import Path

from engine.errors import ConfigurationError
from engine.logs import FORMATS, LEVELS
from engine.options import DEFAULT_PORT, EngineOptions
from engine.paths import default_control_socket
from engine.recording import DEFAULT_MAX_BYTES
from engine.sizes import parse_size
from engine.tunables import TUNABLES, Tunable, TunableValues

_LARGEST_UID = (1 << 32) - 2  # one more stands for nobody


def parser(program: str = "python -m engine.serve") -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(
        prog=program, description="Serve a model over an OpenAI-compatible API, with a KV cache that can be tuned live."
    )
    add = result.add_argument
    add("--model", type=_path, required=True, metavar="DIR", help="model folder: config.json, *.safetensors, tokenizer")
    add("--host", default=EngineOptions.host, help="address to listen on (%(default)s)")
    add("--port", type=int, default=DEFAULT_PORT, help="TCP port; 0 takes a free one (%(default)s)")
    add("--device", default="auto", help="auto, cpu, cuda or cuda:N (%(default)s)")
    add("--dtype", default="auto", help="auto (as the weights say), float32, bfloat16 or float16 (%(default)s)")
    add("--served-model-name", metavar="NAME", help="name in the API (the folder's name)")
    add("--kv-pool-bytes", type=_size, metavar="N", help="KV pool, like 64M or 2G (a share of free memory)")
    add(
        "--host-pool-bytes",
        type=_size,
        default=0,
        metavar="N",
        help="host memory for KV, used with --set host_offload=on (none)",
    )
    add(
        "--host-link-bytes-per-s",
        type=_size,
        metavar="N",
        help="rate of the emulated link to it, without a GPU (a twentieth of the memory's bandwidth)",
    )
    add("--control", type=_path, metavar="SOCKET", help=f"control socket ({default_control_socket()})")
    add(
        "--control-uid",
        type=_uid,
        action="append",
        default=[],
        metavar="UID",
        help="one more user who may use the socket; may be repeated",
    )
    add("--max-model-len", type=int, metavar="TOKENS", help="longest sequence (as the model says)")
    add(
        "--max-waiting",
        type=int,
        default=EngineOptions.max_waiting,
        metavar="N",
        help="queue bound; more get 429 (%(default)s)",
    )
    add(
        "--recent-tokens",
        type=int,
        default=EngineOptions.recent_tokens,
        metavar="N",
        help="newest tokens of a sequence that always stay native (%(default)s)",
    )
    add(
        "--protect-layers",
        type=int,
        default=EngineOptions.protect_layers,
        metavar="N",
        help="keep the KV of the first N layers native whatever the kv_format (%(default)s)",
    )
    add(
        "--recode-budget",
        type=int,
        default=EngineOptions.recode_budget_tokens,
        metavar="TOKENS",
        help="KV recoded per step while requests run (what takes 15 %% of a step's time; on a GPU 512)",
    )
    add(
        "--prefix-pin-share",
        type=float,
        default=EngineOptions.prefix_pin_share,
        metavar="SHARE",
        help="most of the KV pool that pinned prefixes may hold (%(default)s)",
    )
    add("--threads", type=int, metavar="N", help="processor threads for computing (one per core)")
    add("--seed", type=int, help="makes sampling without a seed of its own repeatable")
    add(
        "--grace",
        type=float,
        default=EngineOptions.grace_s,
        metavar="S",
        help="seconds that running requests may go on at exit (%(default)s)",
    )
    add(
        "--stall",
        type=float,
        default=EngineOptions.stall_s,
        metavar="S",
        help="a step that takes longer is a freeze: /health is 503 and watchdog pings stop (%(default)s)",
    )
    add(
        "--quality-table",
        type=_path,
        metavar="FILE",
        help="of autotune compare-formats: formats over budget are refused",
    )
    add(
        "--quality-budget",
        type=float,
        default=EngineOptions.quality_budget_pct,
        metavar="PCT",
        help="perplexity that a format may cost by the table, percent (%(default)s)",
    )
    add(
        "--record",
        type=_new_path,
        metavar="FILE",
        help="write arrival, lengths and salted prefix hashes here, never text",
    )
    add(
        "--record-max",
        type=_size,
        default=DEFAULT_MAX_BYTES,
        metavar="N",
        help="size at which the recording becomes FILE.1 and a new one begins (256M)",
    )
    add(
        "--log-level",
        default="warning",
        choices=LEVELS,
        help="what goes to stderr (%(default)s)",
    )
    add(
        "--log-format",
        default="auto",
        choices=FORMATS,
        help="json, human, or auto: JSON lines unless on a terminal (%(default)s)",
    )
    add(
        "--set",
        action="append",
        default=[],
        metavar="KNOB=VALUE",
        help="a tunable at start, may be repeated: " + "; ".join(map(_choices, TUNABLES.values())),
    )
    return result


def _choices(tunable: Tunable) -> str:
    return f"{tunable.name}={'|'.join(map(str, tunable.values))}"


def options_from(arguments: argparse.Namespace) -> EngineOptions:
    """Raises ConfigurationError for a tunable that is not ``KNOB=VALUE``."""
    tunables: TunableValues = {}
    for text in arguments.set:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigurationError(f"--set {text}: write KNOB=VALUE")
        tunables[name] = value
    return EngineOptions(
        model=arguments.model,
        host=arguments.host,
        port=arguments.port,
        device=arguments.device,
        dtype=arguments.dtype,
        served_model_name=arguments.served_model_name,
        kv_pool_bytes=arguments.kv_pool_bytes,
        host_pool_bytes=arguments.host_pool_bytes,
        host_link_bytes_per_s=arguments.host_link_bytes_per_s,
        control=arguments.control,
        control_uids=tuple(arguments.control_uid),
        tunables=tunables,
        max_model_len=arguments.max_model_len,
        max_waiting=arguments.max_waiting,
        recent_tokens=arguments.recent_tokens,
        protect_layers=arguments.protect_layers,
        recode_budget_tokens=arguments.recode_budget,
        prefix_pin_share=arguments.prefix_pin_share,
        seed=arguments.seed,
        grace_s=arguments.grace,
        stall_s=arguments.stall,
        threads=arguments.threads,
        quality_table=arguments.quality_table,
        quality_budget_pct=arguments.quality_budget,
        record=arguments.record,
        record_max_bytes=arguments.record_max,
    )


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path is empty; name one, or leave the option out")
    return Path(text)


def _new_path(text: str) -> Path:
    if text == "-":
        raise argparse.ArgumentTypeError("this cannot go to standard output; name a path, ./- if that is its name")
    return _path(text)


def _uid(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 10 or int(text) > _LARGEST_UID:
        raise argparse.ArgumentTypeError(f"{text:.20}: a user is a number from 0 to {_LARGEST_UID}")
    return int(text)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
