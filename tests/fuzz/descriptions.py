"""OpenAPI descriptions of all HTTP interfaces, made from the models and declarations that servers check by."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

from autotune.metrics import MODES
from autotune.writers import LONGEST_PIN_S
from engine.recording import PROBE_HEADER
from engine.server.control import PatchBody
from engine.server.protocol import ChatRequest, CompletionRequest, FeedbackRequest, TokenizeRequest
from engine.tunables import TUNABLES

_REF = "#/components/schemas/{model}"
_KNOB: Final = {"enum": list(TUNABLES)}
_WHO: Final = {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._@-]{0,23}$"}
_ORDERS: Final[dict[str, dict[str, Any]]] = {
    "/control/mode": {"type": "object", "properties": {"mode": {"enum": list(MODES)}}, "required": ["mode"]},
    # Each knob with its own values: of pairs that are drawn independently hardly one is carried out.
    "/control/set": {
        "anyOf": [
            {
                "type": "object",
                "properties": {
                    "knob": {"const": knob},
                    "value": {"enum": list(tunable.values)},
                    "for_s": {"type": "number", "exclusiveMinimum": 0, "maximum": LONGEST_PIN_S},
                    "reason": {"type": "string", "maxLength": 200},
                    "who": _WHO,
                },
                "required": ["knob", "value"],
                "additionalProperties": False,
            }
            for knob, tunable in TUNABLES.items()
        ]
    },
    "/control/release": {"type": "object", "properties": {"knob": _KNOB, "who": _WHO}, "additionalProperties": False},
    "/control/reload": {"type": "object"},
}


def openai() -> dict[str, Any]:
    """What clients of the engine may send."""
    posts = {
        "/v1/completions": CompletionRequest,
        "/v1/chat/completions": ChatRequest,
        "/v1/feedback": FeedbackRequest,
        "/tokenize": TokenizeRequest,
    }
    components: dict[str, Any] = {}
    headers = [{"name": name, "in": "header", "schema": {"type": "string"}} for name in ("x-request-id", PROBE_HEADER)]
    paths = {path: {"post": operation(headers, modelled(model, components))} for path, model in posts.items()}
    paths |= {path: {"get": operation()} for path in ("/v1/models", "/health", "/metrics")}
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{name}"] = {"get": operation([name])}
    return document("engine", paths, components)


def control() -> dict[str, Any]:
    """The engine's control socket, which nobody should reach but its own user."""
    components: dict[str, Any] = {}
    body = modelled(PatchBody, components)
    components["PatchBody"]["properties"]["changes"] = {
        "type": "object",
        "properties": {name: {"enum": list(tunable.values)} for name, tunable in TUNABLES.items()},
        "minProperties": 1,
    }
    pin = {"name": "pin_id", "in": "path", "required": True, "schema": {"type": "integer"}}
    paths = {
        "/v1/tunables": {"get": operation(), "patch": operation(body=body)},
        "/v1/stats": {"get": operation()},
        "/v1/audit": {"get": operation()},
        "/v1/about": {"get": operation()},
        "/v1/pins": {"get": operation(), "delete": operation()},
        "/v1/pins/{pin_id}": {"delete": operation([pin])},
    }
    return document("control", paths, components)


NOT_WELL = ("/healthz",)
"""Of the admin port, not fuzzed by what calls a 503 a fault: this one tells of faults, and a fuzzer makes some."""


def admin() -> dict[str, Any]:
    """The daemon's admin port, for who has no token: orders are refused."""
    limit = {"name": "limit", "in": "query", "schema": {"type": "integer", "minimum": 1, "maximum": 500}}
    token = {"name": "authorization", "in": "header", "schema": {"type": "string"}}
    known = [
        {"name": name, "in": "query", "schema": {"type": "integer", "minimum": 0}} for name in ("after", "decisions")
    ]
    known.append({"name": "process", "in": "query", "schema": {"type": "string"}})
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
    paths = {
        "/metrics": {"get": operation()},
        "/decisions": {"get": operation([limit])},
        "/status": {"get": operation()},
        "/": {"get": operation()},
        "/dashboard/about": {"get": operation()},
        "/dashboard/data": {"get": operation(known)},
        "/dashboard/{name}": {"get": operation([name])},
        **{path: {"post": operation([token], body)} for path, body in _ORDERS.items()},
    }
    return document("admin", paths, {})


def orders() -> dict[str, Any]:
    """The same port's orders, for who has the token and sends it along."""
    return document("orders", {path: {"post": operation(body=body)} for path, body in _ORDERS.items()}, {})


def modelled(model: type[BaseModel], components: dict[str, Any]) -> dict[str, Any]:
    """A reference to the model's schema, which is put among ``components`` with all that it refers to."""
    schema = model.model_json_schema(ref_template=_REF)
    components |= schema.pop("$defs", {})
    components[model.__name__] = schema
    return {"$ref": _REF.format(model=model.__name__)}


def operation(parameters: list[dict[str, Any]] | None = None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    answers = {"default": {"description": "whatever it is"}}
    made: dict[str, Any] = {"parameters": parameters or [], "responses": answers}
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    return made


def document(title: str, paths: dict[str, Any], components: dict[str, Any]) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "components": {"schemas": components},
    }
