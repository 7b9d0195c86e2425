"""What can be ordered over the admin port: only with the token, answered in one line, done by the control loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from autotune.admin_token import is_token
from autotune.commands import Commands, NotDoneError
from engine.control_client import EngineUnreachable
from engine.json_text import load_json
from engine.text import one_line

Action = Callable[[Mapping[str, object]], dict[str, Any]]
"""Takes the request's JSON object; returns the answer, of which ``answer`` is one line and all else is for machines.
Raises ValueError for what it cannot do, EngineUnreachable.
"""

_MAX_BODY_BYTES = 4096
_PATIENCE_S = 10.0


def action_routes(actions: Mapping[str, Action], commands: Commands, token: str) -> list[Route]:
    """``POST /control/NAME`` for every action, with ``Authorization: Bearer TOKEN``.

    Answers 200 with the action's answer, ``{"answer": line}`` at least, or ``{"error": line}`` with 401 (no or a wrong
    token), 400 or 413 (a request that cannot be done), 503 (the loop does not get to it, or no engine
    answers).
    """
    return [
        Route(f"/control/{name}", _endpoint(action, commands, token), methods=["POST"])
        for name, action in actions.items()
    ]


def _endpoint(action: Action, commands: Commands, token: str) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer" or not is_token(given.strip(), token):
            answer = _error(401, "a token is needed; the daemon's is in its admin.token file")
            answer.headers["www-authenticate"] = "Bearer"
            return answer
        body = await _body(request)
        if isinstance(body, Response):
            return body
        try:
            done = await run_in_threadpool(commands.order, lambda: action(body), _PATIENCE_S)
        except (NotDoneError, EngineUnreachable) as error:
            return _error(503, str(error))
        except ValueError as error:
            return _error(400, str(error))
        return JSONResponse({**done, "answer": one_line(done["answer"], 1000)})

    return endpoint


async def _body(request: Request) -> Mapping[str, object] | Response:
    text = b""
    try:
        async for chunk in request.stream():
            text += chunk
            if len(text) > _MAX_BODY_BYTES:
                return _error(413, f"more than {_MAX_BODY_BYTES} bytes")
        body = load_json(text) if text else {}
    except ClientDisconnect:
        return _error(400, "the request ended early")
    except ValueError:
        return _error(400, "not JSON")
    return body if isinstance(body, dict) else _error(400, "not a JSON object")


def _error(status: int, line: str) -> Response:
    return JSONResponse({"error": one_line(line, 1000)}, status_code=status)
