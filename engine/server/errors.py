"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from collections.abc import Mapping

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from engine.admission import AdmissionError

# nginx's "client closed request"; nobody reads it, but logs and metrics do.
CLIENT_CLOSED = 499


class ApiError(Exception):
    """An error that becomes a response. ``param`` names the field that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = encodable(message)
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


class BadRequest(ApiError):  # noqa: N818 - HTTP's name for it
    """400 for one field of a request."""

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(400, message, param=param, code=code)


def unavailable(message: str) -> ApiError:
    return ApiError(503, message, kind="server_error", code="engine_unavailable")


def from_admission(error: AdmissionError, retry_after_s: int) -> ApiError:
    """429 for a full queue, 503 for an engine that has stopped, else 400: this request can never run."""
    if error.kind == "queue_full":
        headers = {"Retry-After": str(retry_after_s)}
        return ApiError(429, str(error), kind="rate_limit_error", code="queue_full", headers=headers)
    if error.kind == "engine_broken":
        return unavailable(str(error))
    code = "context_length_exceeded" if error.kind == "too_long" else error.kind
    return BadRequest(str(error), "prompt", code)


def encodable(text: str) -> str:
    """The text with lone surrogates, which JSON may smuggle in and UTF-8 cannot carry, as question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


async def client_gone(_http: HttpRequest, _error: Exception) -> Response:
    """For a client that hung up before its request was whole: no answer is read, and it is no error of ours."""
    return Response(status_code=CLIENT_CLOSED)
