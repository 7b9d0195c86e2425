"""``autotune record-proxy``: write down the shape of the traffic of any OpenAI-compatible server."""

from __future__ import annotations

import asyncio
import ipaddress
import sys
from pathlib import Path
from typing import Annotated

import typer

from autotune.cli._shared import CliError, new_path


def register(app: typer.Typer) -> None:
    app.command("record-proxy", short_help="Record the traffic of any OpenAI server.")(record_proxy)


def record_proxy(
    *,
    target: Annotated[str, typer.Option(metavar="URL", help="The server, with or without /v1.")],
    record: Annotated[
        Path, typer.Option(metavar="FILE", help="Write arrival, lengths and salted hashes here.", parser=new_path)
    ],
    listen: Annotated[str, typer.Option(metavar="HOST:PORT", help="Where clients connect.")] = "127.0.0.1:8100",
    record_max: Annotated[str, typer.Option(metavar="N", help="Size at which FILE becomes FILE.1.")] = "256M",
) -> None:
    """Pass calls through to an OpenAI-compatible server and record its completions and chats until Ctrl-C.

    Recorded are arrival, lengths in tokens, how the answer ended, and salted hashes of prompt chunks of about 16
    tokens; never text. Lengths are the server's own where it reports usage (clients ask for it in streams with
    stream_options.include_usage), else estimates that are marked. The file is a trace: autotune trace inspect FILE.
    """
    from autotune.proxy.serve import serve_proxy  # noqa: PLC0415  # slow imports, and not for --help
    from autotune.replay.wire import Endpoint  # noqa: PLC0415
    from engine.clock import RealClock  # noqa: PLC0415
    from engine.errors import EngineError  # noqa: PLC0415
    from engine.recording import TrafficRecorder  # noqa: PLC0415
    from engine.serve import bind_tcp  # noqa: PLC0415
    from engine.sizes import parse_size  # noqa: PLC0415

    try:
        endpoint, size = Endpoint.parse(target), parse_size(record_max)
        host, port = _address(listen)
    except ValueError as error:
        raise CliError(str(error), 2) from None
    clock = RealClock()
    try:
        listener = bind_tcp(host, port)
    except EngineError as error:
        raise CliError(str(error).replace("--port", "--listen")) from None
    with listener:
        try:
            recorder = TrafficRecorder(record, clock, max_bytes=size, of_text=True)
        except EngineError as error:
            raise CliError(str(error)) from None
        bound = listener.getsockname()
        shown = f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"
        open_to = "" if _is_loopback(bound[0]) else ", open to other machines"

        def ready() -> None:
            print(f"record-proxy: http://{shown} to {endpoint.url}, recording to {record}{open_to}", file=sys.stderr)  # noqa: T201

        try:
            asyncio.run(serve_proxy(endpoint, listener, recorder, clock, on_ready=ready))
        finally:
            recorder.close()


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or not host:
        raise ValueError(f"--listen {text!r}: expected HOST:PORT, like 127.0.0.1:8100")
    return host.removeprefix("[").removesuffix("]"), int(port)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
