"""``autotune plan``: what a model needs, what a machine holds of it, and what each setting saves and costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autotune.cli._shared import CliError, console_for_stdout, given_path

if TYPE_CHECKING:
    from autotune.planning.plan import Question
    from engine.models.config import ModelConfig
    from envs.analytic import DataSheet
    from envs.latency_model import LatencyModel
    from envs.profile import Profile

_MOST_DIGITS = 12


def register(app: typer.Typer) -> None:
    app.command("plan", short_help="Work out what a model needs and what fits.")(plan)


def plan(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="Model folder, or a config.json alone.", parser=given_path)
    ],
    *,
    gpu: Annotated[
        str, typer.Option("--gpu", metavar="GPU", help="H200, H100, A100, L4, a size such as 24G, or cpu.")
    ] = "cpu",
    context: Annotated[
        str, typer.Option(metavar="N[,N...]", help="Tokens per session; 2048, 8192 and 32768 if absent.")
    ] = "",
    sessions: Annotated[int | None, typer.Option(min=1, max=10**9, help="Sessions that are to fit at once.")] = None,
    kv_format: Annotated[str, typer.Option(help="native, int8, k8v4 or int4.")] = "native",
    block_size: Annotated[int, typer.Option(help="16, 32, 64, 128 or 256.")] = 16,
    kv_pool_bytes: Annotated[
        str | None, typer.Option(metavar="N", help="KV pool, like 2G; the engine's own choice if absent.")
    ] = None,
    host_pool_bytes: Annotated[
        str | None, typer.Option(metavar="N", help="Host memory for KV, like 32G; none if absent.")
    ] = None,
    host_memory: Annotated[str | None, typer.Option(metavar="N", help="The machine's memory, like 64G.")] = None,
    cpu: Annotated[int | None, typer.Option(min=1, max=65_536, help="The machine's processor cores.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    protect_layers: Annotated[int, typer.Option(min=0, help="First layers that keep their KV native.")] = 0,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Profile of this model: its quality and step times.", parser=given_path),
    ] = None,
    quality: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Quality table of autotune compare-formats.", parser=given_path),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> int:
    """Work out weights, KV memory by format and context, sessions that fit, what settings save and what they cost.

    Nothing is loaded but the configuration. Exit code 1 when something that was asked for does not fit.
    """
    from autotune import profiling  # noqa: PLC0415  # imports that --help need not wait for
    from autotune.planning import view  # noqa: PLC0415
    from autotune.planning.build import make_plan  # noqa: PLC0415
    from autotune.planning.losses import losses  # noqa: PLC0415
    from autotune.planning.machine import machine_of  # noqa: PLC0415
    from autotune.planning.plan import Question  # noqa: PLC0415
    from autotune.planning.verdicts import verdicts  # noqa: PLC0415
    from engine.errors import EngineError  # noqa: PLC0415
    from engine.tunables import parse_change  # noqa: PLC0415
    from envs.profile import read_profile  # noqa: PLC0415

    try:
        parse_change("kv_format", kv_format)
        parse_change("block_size", block_size)
        question = Question(
            contexts=_contexts(context),
            sessions=sessions,
            kv_format=kv_format,
            block_size=block_size,
            dtype=dtype,
            kv_pool_bytes=_size("--kv-pool-bytes", kv_pool_bytes),
            host_pool_bytes=_size("--host-pool-bytes", host_pool_bytes) or 0,
            protect_layers=protect_layers,
        )
    except ValueError as error:
        raise CliError(str(error), 2) from None
    try:
        config, name = profiling.model_config(model)
        machine = machine_of(gpu, _size("--host-memory", host_memory), cpu)
        measured = None if profile is None else _fitting(read_profile(profile), config, question, profile)
        latency, source = _latency(config, machine.sheet, measured)
        found = make_plan(config, name, machine, question, losses(measured, quality, model), latency, source)
    except EngineError as error:
        raise CliError(str(error)) from error
    said = verdicts(found)
    if as_json:
        typer.echo(json.dumps(view.document(found, said), indent=2))
    else:
        view.show(found, said, console_for_stdout())
    return int(any(verdict.fits is False for verdict in said))


def _size(option: str, text: str | None) -> int | None:
    from engine.sizes import parse_size  # noqa: PLC0415

    try:
        return None if text is None else parse_size(text)
    except ValueError as error:
        raise CliError(f"{option}: {error}", 2) from None


def _contexts(text: str) -> tuple[int, ...]:
    """``"2048,8192"`` as numbers."""
    parts = [part.strip() for part in text.split(",")] if text.strip() else []
    wrong = [part for part in parts if not (part.isascii() and part.isdecimal() and 1 <= len(part) <= _MOST_DIGITS)]
    if wrong:
        raise CliError(f"--context {wrong[0][:40]!r}: give tokens, such as 2048 or 2048,8192", 2)
    return tuple(map(int, parts))


def _fitting(profile: Profile, config: ModelConfig, question: Question, path: Path) -> Profile:
    """The profile, if it is of a model of this shape. Raises CliError for another one's."""
    from engine.models.dtypes import DTYPE_BYTES, resolve_dtype  # noqa: PLC0415
    from engine.models.groups import layer_groups  # noqa: PLC0415

    shapes = [group.shape for group in profile.groups()]
    element_bytes = DTYPE_BYTES[resolve_dtype(question.dtype, config.dtype)]
    wanted = [group.shape for group in layer_groups(config, element_bytes)]
    if shapes != wanted:
        raise CliError(f"{path} is the profile of {profile.model.name}, a model of another shape")
    return profile


def _latency(config: ModelConfig, sheet: DataSheet | None, profile: Profile | None) -> tuple[LatencyModel | None, str]:
    """What steps cost and where that is from; a profile's figures are of its own device."""
    from envs.analytic import analytic_seconds  # noqa: PLC0415
    from envs.latency_model import LatencyModel  # noqa: PLC0415

    if profile is not None:
        return profile.latency_model(), f"profile {profile.describe()}"
    if sheet is None:
        return None, ""
    try:
        return LatencyModel(*analytic_seconds(config, sheet)), "estimated from the data sheet"
    except ValueError:  # so large a model that a step would take hours
        return None, ""
