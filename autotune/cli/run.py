"""``autotune run``: engine and daemon together under one parent, or the demonstration of both."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from autotune.cli._shared import CliError, ControlOption, given_path, new_path

if TYPE_CHECKING:
    from engine.options import EngineOptions

_TITLE = "autotune run"


def register(app: typer.Typer) -> None:
    # What is not declared here is the engine's; its own parser judges it.
    settings = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command("run", short_help="Engine and daemon together, or a demo.", context_settings=settings)(run)


def run(
    context: typer.Context,
    *,
    demo: Annotated[
        bool, typer.Option("--demo", help="Demonstrate tuning on a bursty load (what happens without --model, too).")
    ] = False,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Model folder; the bundled model is demonstrated if absent.", parser=given_path
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    config: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The daemon's YAML configuration.", parser=given_path)
    ] = None,
    control: ControlOption = None,
    host: Annotated[str | None, typer.Option(help="Address of the engine's API; 127.0.0.1 if absent.")] = None,
    port: Annotated[
        int | None, typer.Option(help="Port of the engine's API; 8000 if absent, 0 takes a free one.")
    ] = None,
    kv_pool_bytes: Annotated[str | None, typer.Option(metavar="N", help="KV pool, like 64M or 2G.")] = None,
    host_pool_bytes: Annotated[
        str | None, typer.Option(metavar="N", help="Host memory for KV, like 8G; used with --set host_offload=on.")
    ] = None,
    tunables: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KNOB=VALUE", help="A tunable at start, like kv_format=int8; may be repeated."),
    ] = None,
    protect_layers: Annotated[
        int | None, typer.Option(metavar="N", help="Keep the KV of the first N layers native.")
    ] = None,
    quality_table: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Of autotune compare-formats: formats over budget are refused.", parser=given_path
        ),
    ] = None,
    quality_budget: Annotated[
        float | None,
        typer.Option(metavar="PCT", help="Perplexity that a format may cost by the table, percent; 0.5 if absent."),
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="Of both: json, human, or auto, JSON lines unless on a terminal.")
    ] = None,
    pairs: Annotated[
        int | None, typer.Option(min=1, help="Demonstration: replays with and without tuning; 1 if absent.")
    ] = None,
    duration: Annotated[
        float | None,
        typer.Option(metavar="S", min=1, max=86_400, help="Demonstration: seconds of load per replay; 90 if absent."),
    ] = None,
    workload: Annotated[
        str | None, typer.Option(help="Demonstration: built-in workload; reasoning-bursty if absent.")
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            "--rules",
            help="Demonstration: a preset, a rules file, predictor or learned:FOLDER; default if absent.",
        ),
    ] = None,
    against: Annotated[
        list[str] | None,
        typer.Option(
            metavar="POLICY",
            help="Demonstration: compare with this (as --policy, or static:KNOB=VALUE,...; none, the default, is a "
            "native cache without a daemon); repeatable, and every round has all of them.",
        ),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Demonstration: from autotune profile, for predictor, and to simulate what was replayed.",
            parser=given_path,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Demonstration: seed of the load; 1 if absent.")] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Demonstration: keep the last one's logs and journals.", parser=new_path),
    ] = None,
) -> int:
    """Run engine and daemon on a model until Ctrl-C; without --model, demonstrate them on the bundled one.

    Any other option of autotune engine (--record, --max-model-len, --threads ...) may be given, too, and is passed on.

    The demonstration measures this machine, sizes a KV pool and a load that a native cache cannot carry, replays the
    load with the daemon on and off, and ends with one line of JSON.
    """
    of_engine = {
        "--control": control, "--host": host, "--port": port, "--kv-pool-bytes": kv_pool_bytes,
        "--host-pool-bytes": host_pool_bytes, "--protect-layers": protect_layers, "--quality-table": quality_table,
        "--quality-budget": quality_budget, "--set": tunables,
    }  # fmt: skip
    of_demo = {
        "pairs": pairs, "duration_s": duration, "workload": workload, "policy": policy, "against": against,
        "profile": profile, "seed": seed, "run_folder": run_dir,
    }  # fmt: skip
    given = {name: value for name, value in of_demo.items() if value is not None}
    if demo or model is None:
        _refuse(
            [*_flags(of_engine | {"--config": config, "--log-format": log_format}), *context.args],
            "only with --model and without --demo, which sets up its own engine",
        )
        return _demonstrate({"device": device, "dtype": dtype, **given}, model)
    names = {"duration_s": "duration", "run_folder": "run-dir"}
    _refuse([f"--{names.get(name, name)}" for name in given], "only with --demo, when there is a --model")
    # The children print into pipes: whether people read along only their parent knows.
    people = log_format in {None, "auto"} and sys.stderr.isatty()
    shown = {"--log-format": "human" if people else log_format}
    engine = ["--model", str(model), "--device", device, "--dtype", dtype, *_flags(of_engine | shown), *context.args]
    return _serve(engine, config, list(_flags(shown)))


def _flags(options: dict[str, Any]) -> Iterator[str]:
    """The options that were given, as a command line."""
    for name, value in options.items():
        for one in value if isinstance(value, list) else [] if value is None else [value]:
            yield from (name, str(one))


def _refuse(arguments: Sequence[str], why: str) -> None:
    if arguments:
        raise CliError(f"{arguments[0]}: {why} (see {_TITLE} --help)", 2)


def _demonstrate(given: dict[str, Any], model: Path | None) -> int:
    from rich.console import Console  # noqa: PLC0415  # slow imports, and not for --help

    from autotune.demo.afterwards import program_words  # noqa: PLC0415
    from autotune.demo.bundled import bundled_model, bundled_profile  # noqa: PLC0415
    from autotune.demo.options import DemoError, DemoOptions  # noqa: PLC0415
    from autotune.demo.quality_note import quality_note  # noqa: PLC0415
    from autotune.demo.run import run_demo  # noqa: PLC0415
    from autotune.demo.sides import NATIVE, sides  # noqa: PLC0415
    from engine.clock import RealClock  # noqa: PLC0415
    from engine.errors import EngineError  # noqa: PLC0415
    from envs.profile import read_profile  # noqa: PLC0415
    from envs.workload.catalogue import CATALOGUE  # noqa: PLC0415

    # Daemons that follow them start minutes later: what is wrong with a policy or a profile is said now.
    names = (given.pop("policy", "default"), *given.pop("against", [NATIVE]))
    path, model = given.pop("profile", None), model or bundled_model()
    try:
        profile = None if path is None else read_profile(path)
        bundled = bundled_profile(model) if path is None else None
        given |= {"sides": sides(names, path or bundled, profile), "profile": profile}
        source = f"{path}" if bundled is None else f"the profile that comes with this model ({bundled.name})"
        note = quality_note(profile if bundled is None else read_profile(bundled), source)
    except (ValueError, EngineError) as error:
        raise CliError(f"--policy, --against or --profile: {error}", 2) from error
    called = tuple(program_words(sys.argv[0], sys.executable))
    options = DemoOptions(model=model, notes=(note,), called=called, **given)
    if options.workload not in CATALOGUE:
        raise CliError(f"--workload {options.workload!r} is not built in; choose one of {', '.join(CATALOGUE)}", 2)
    try:
        return run_demo(options, RealClock(), Console(highlight=False))
    except DemoError as error:
        raise CliError(str(error)) from None


def _serve(engine: list[str], config: Path | None, more_of_daemon: list[str]) -> int:
    # Everything that can be seen to be wrong is said before anything starts.
    options = _engine_options(engine)
    _check_config(config)

    from rich.console import Console  # noqa: PLC0415

    from autotune.child import SupervisorError  # noqa: PLC0415
    from autotune.together import run_together  # noqa: PLC0415
    from engine.clock import RealClock  # noqa: PLC0415

    control = options.control_path
    daemon = ["--control", str(control), *_flags({"--config": config}), *more_of_daemon]
    try:
        return run_together(engine, daemon, control, RealClock(), Console(stderr=True, highlight=False))
    except SupervisorError as error:
        raise CliError(error.problem) from None


def _engine_options(arguments: list[str]) -> EngineOptions:
    from engine.arguments import options_from, parser  # noqa: PLC0415
    from engine.errors import EXIT_CONFIGURATION, ConfigurationError  # noqa: PLC0415
    from engine.options import check  # noqa: PLC0415

    def usage(message: str) -> NoReturn:
        raise CliError(f"{message} (see {_TITLE} --help and autotune engine --help)", 2)

    reader = parser(_TITLE)
    reader.error = usage  # type: ignore[method-assign]  # one line in place of the usage text
    try:
        options = options_from(reader.parse_args(arguments))
        check(options)
    except ConfigurationError as error:
        raise CliError(str(error), EXIT_CONFIGURATION) from error
    return options


def _check_config(path: Path | None) -> None:
    if path is None:
        return
    from autotune.config import ConfigError, load_config  # noqa: PLC0415
    from autotune.wiring import check_rules  # noqa: PLC0415

    try:
        check_rules(load_config(path))
    except ConfigError as error:
        raise CliError(str(error)) from error
