"""``autotune replay``: send a trace's requests to any OpenAI-compatible server at their arrival times."""

from __future__ import annotations

import asyncio
import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autotune.cli._places import check_places, is_stdout, write_parts
from autotune.cli._shared import CliError, given_path

if TYPE_CHECKING:
    from rich.console import Console

    from autotune.replay.session import Result
    from envs.workload.scaling import Scaling
    from envs.workload.trace import Trace

_DEFAULT_GENERATED_S = 120.0
_MOST_VOCAB = 1 << 22  # beyond every model, and still a list that fits in memory


def register(app: typer.Typer) -> None:
    app.command("replay", short_help="Replay a trace against a server.")(replay)


def replay(
    trace: Annotated[str, typer.Argument(help="A trace file, or the name of a built-in workload (see --list).")] = "",
    *,
    list_workloads: Annotated[bool, typer.Option("--list", help="Show the built-in workloads.")] = False,
    url: Annotated[str, typer.Option(help="Server, with or without /v1.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name; the first that the server lists if absent.")] = None,
    length_scale: Annotated[float, typer.Option(help="Divide prompt and output lengths by this.")] = 1.0,
    time_scale: Annotated[float, typer.Option(help="Multiply arrival times by this; 2 halves the rate.")] = 1.0,
    keep: Annotated[float, typer.Option(help="Share of the requests to keep, at random.")] = 1.0,
    max_prompt_tokens: Annotated[int | None, typer.Option(help="Cut prompts to this, after scaling.")] = None,
    max_output_tokens: Annotated[int | None, typer.Option(help="Cut outputs to this, after scaling.")] = None,
    start: Annotated[float, typer.Option(min=0, help="Leave out what arrives before, before stretching.")] = 0.0,
    duration: Annotated[float | None, typer.Option(help="Seconds to replay, after stretching.")] = None,
    max_requests: Annotated[int | None, typer.Option(help="Stop after this many requests.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Mean requests per second: stretches arrivals, or makes them (Poisson).")
    ] = None,
    ttft_target: Annotated[float | None, typer.Option(help="Seconds to the first token that goodput allows.")] = None,
    tbt_target: Annotated[float | None, typer.Option(help="Seconds between tokens that goodput allows.")] = None,
    tbt_quantile: Annotated[float, typer.Option(help="Which of a request's gaps --tbt-target judges.")] = 0.95,
    vocab: Annotated[
        int | None, typer.Option(max=_MOST_VOCAB, help="Make prompts of token ids below this; else ask the server.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Send prompts as text, not token ids.")] = False,
    skip_bad_lines: Annotated[bool, typer.Option("--skip-bad-lines", help="Count broken lines, go on.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds until a request counts as failed.")] = 300.0,
    max_connections: Annotated[int, typer.Option(help="Open at once; requests past it fail, none waits.")] = 1024,
    header: Annotated[list[str] | None, typer.Option(help="Extra request header, 'Name: value'.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of prompts, thinning and generators.")] = 0,
    json_out: Annotated[
        Path | None,
        typer.Option("--json", help="Write the summary here; - for stdout.", metavar="FILE", parser=given_path),
    ] = None,
    records_out: Annotated[
        Path | None,
        typer.Option(
            "--records", help="Write every request here, JSON lines; - for stdout.", metavar="FILE", parser=given_path
        ),
    ] = None,
) -> int:
    """Replay TRACE open loop and report latency, throughput and goodput.

    TRACE is CSV or JSON lines, gzip or not, in the Azure, BurstGPT or Mooncake form, or arrival_s,prompt_tokens,
    output_tokens. Exits with 1 when nothing completed, 130 after Ctrl-C and 143 after SIGTERM (with the summary
    so far).
    """
    from rich.console import Console  # noqa: PLC0415  # slow imports, and not for --help

    from autotune.cli.trace import print_catalogue  # noqa: PLC0415
    from autotune.replay.runner import connection_bound  # noqa: PLC0415
    from autotune.replay.summary import Targets  # noqa: PLC0415
    from autotune.replay.view import summary_table  # noqa: PLC0415
    from autotune.replay.wire import Endpoint  # noqa: PLC0415
    from envs.workload.scaling import Scaling  # noqa: PLC0415
    from envs.workload.trace import TraceError  # noqa: PLC0415

    to_stdout = is_stdout(json_out) or is_stdout(records_out)
    console = Console(stderr=to_stdout, highlight=False)
    if list_workloads:
        print_catalogue(console)
        return 0
    if not trace:
        raise CliError("name a trace file or a built-in workload (autotune replay --list)", 2)
    try:
        _check_positive(
            {"--timeout": timeout, "--max-connections": max_connections, "--rate": rate, "--vocab": vocab}
            | {"--ttft-target": ttft_target, "--tbt-target": tbt_target}
        )
        _check_quantile(tbt_quantile)
        check_places({"--json": json_out, "--records": records_out}, {"TRACE": trace})
        endpoint = Endpoint.parse(url)
        headers = tuple(_header(line) for line in header or [])
        scaling = Scaling(
            length_scale, time_scale, keep, max_prompt_tokens, max_output_tokens, duration, max_requests, seed, rate
        )
        workload = _load(trace, scaling, start, skip_bad_lines=skip_bad_lines)
    except TraceError as error:
        raise CliError(str(error)) from None
    except ValueError as error:
        raise CliError(str(error), 2) from None
    targets = Targets(ttft_target, tbt_target, tbt_quantile)
    signals: list[signal.Signals] = []
    outcome = asyncio.run(
        _session(
            workload,
            endpoint,
            targets,
            console,
            client_options={
                "max_connections": connection_bound(max_connections),
                "timeout_s": timeout,
                "headers": headers,
            },
            learn_options={"model": model, "vocab": vocab, "text": text},
            seed=seed,
            signals=signals,
        )
    )
    interrupted = 128 + (signals[0] if signals else signal.SIGINT)
    if outcome is None:  # interrupted before anything was sent
        return interrupted
    result, sent, server = outcome
    summary = result.summary
    console.print(summary_table(summary, f"{sent.name}{' (stopped early)' if summary.partial else ''}"))
    document = {
        "trace": sent.name,
        "scaling": scaling.to_json(),
        "notes": list(sent.notes),
        "skipped_lines": sent.skipped_lines,
        "server": {"url": endpoint.url, **server},
        **summary.to_json(),
    }
    _write(document, json_out, records_out, result)
    if summary.partial:
        return interrupted
    if not summary.completed:
        raise CliError(f"no request completed; the first failure: {summary.first_failure or 'none was sent'}")
    return 0


def _load(name: str, scaling: Scaling, start_s: float, *, skip_bad_lines: bool) -> Trace:
    from envs.workload.catalogue import CATALOGUE  # noqa: PLC0415
    from envs.workload.generators import generate  # noqa: PLC0415
    from envs.workload.loaders import load_trace  # noqa: PLC0415
    from envs.workload.scaling import scale  # noqa: PLC0415
    from envs.workload.splits import window  # noqa: PLC0415

    path = Path(name)
    if name in CATALOGUE and not path.exists():
        # A rate is generated, not stretched to: pauses to think stay what they are. Enough for what is asked for; a
        # stretched trace needs less of the source.
        workload = CATALOGUE[name]
        factor = 1.0 if scaling.rate_rps is None else scaling.rate_rps / (workload.mean_rps * scaling.keep)
        duration_s = start_s + (scaling.duration_s or _DEFAULT_GENERATED_S) / scaling.time_scale
        loaded = generate(workload, duration_s=duration_s, seed=scaling.seed, rate_scale=factor)
        scaling = replace(scaling, rate_rps=None)
    elif path.is_file():
        loaded = load_trace(path, skip_bad_lines=skip_bad_lines, rate_rps=scaling.rate_rps, seed=scaling.seed)
    else:
        raise CliError(f"{name}: no such file, nor a built-in workload ({', '.join(CATALOGUE)})", 2)
    return scale(window(loaded, start_s) if start_s else loaded, scaling)


async def _session(
    trace: Trace,
    endpoint: Any,
    targets: Any,
    console: Console,
    *,
    client_options: dict[str, Any],
    learn_options: dict[str, Any],
    seed: int,
    signals: list[signal.Signals],
) -> tuple[Result, Trace, dict[str, Any]] | None:
    """``signals``: gets those that ended it. None if one came before anything was sent."""
    from autotune.replay.client import Client  # noqa: PLC0415
    from autotune.replay.handshake import ServerError, learn  # noqa: PLC0415
    from autotune.replay.session import run_session  # noqa: PLC0415
    from engine.clock import RealClock  # noqa: PLC0415
    from envs.workload.scaling import cap_context  # noqa: PLC0415

    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def interrupt(number: signal.Signals) -> None:
        signals.append(number)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt, number)
    client = Client(endpoint, RealClock(), **client_options)
    learning = asyncio.create_task(learn(client, **learn_options))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({learning, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not learning.done():
        learning.cancel()
        return None
    try:
        server = learning.result()
    except ServerError as error:
        raise CliError(str(error)) from None
    if server.max_model_len is not None:
        trace = cap_context(trace, server.max_model_len)
    described = server.describe()
    for note in trace.notes:
        console.print(
            f"{trace.name}: {note}" if not note.startswith("generated") else note, markup=False, soft_wrap=True
        )
    console.print(
        f"{len(trace.requests)} requests over {trace.duration_s:.1f} s, {trace.prompt_tokens} prompt and "
        f"{trace.output_tokens} output tokens, to {described['model']} at {endpoint.url} "
        f"(prompts: {described['prompts']})",
        markup=False,
        soft_wrap=True,
    )
    result = await run_session(trace, client, server, targets, stop=stop, seed=seed, console=console, title=trace.name)
    return result, trace, described


def _write(document: dict[str, Any], json_out: Path | None, records_out: Path | None, result: Result) -> None:
    if json_out is not None:
        write_parts(json_out, [json.dumps(document, indent=None if is_stdout(json_out) else 2), "\n"])
    if records_out is not None:
        write_parts(records_out, (json.dumps(one.to_json()) + "\n" for one in result.progress.records))


def _header(line: str) -> tuple[str, str]:
    name, found, value = line.partition(":")
    if not found or not name.strip() or any(character in line for character in "\r\n"):
        raise ValueError(f"--header {line!r}: expected 'Name: value'")
    return name.strip(), value.strip()


def _check_positive(values: dict[str, float | None]) -> None:
    for name, value in values.items():
        if value is not None and not value > 0:
            raise ValueError(f"{name} must be > 0, got {value:g}")


def _check_quantile(value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"--tbt-quantile must be in (0, 1], got {value:g}")
