"""Learn what a server is before loading it: its model, context, vocabulary, and which request fields it takes."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, Final

from autotune.replay.client import Answer, Client, token_count
from autotune.replay.prompts import WORDS, PromptMaker, TextPrompts, TokenPrompts
from autotune.replay.wire import WireError
from engine.recording import PROBE_HEADER
from engine.text import trouble
from envs.workload.trace import Trace, TraceRequest

# Richest first: exact counts per event and exact lengths, exact lengths, plain OpenAI.
_RICH: Final[dict[str, Any]] = {
    "ignore_eos": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
_EXACT: Final[dict[str, Any]] = {"ignore_eos": True, "stream_options": {"include_usage": True}}
_PLAIN: Final[dict[str, Any]] = {"stream_options": {"include_usage": True}}
_MIN_VOCABULARY: Final = 32


class ServerError(Exception):
    """The server cannot be used for a replay; one line that says why and what to do."""


@dataclass(frozen=True)
class Server:
    """What requests to this server look like. ``vocabulary`` empty: prompts are text."""

    model: str
    max_model_len: int | None
    vocabulary: tuple[int, ...]
    tokens_per_word: float
    extras: dict[str, Any] = field(default_factory=dict)

    @property
    def exact_tokens(self) -> bool:
        """Whether the server was asked to go on to exactly ``max_tokens``."""
        return bool(self.extras.get("ignore_eos"))

    def prompts(self, trace: Trace, seed: int) -> PromptMaker:
        if self.vocabulary:
            return TokenPrompts(self.vocabulary, trace.block_tokens, seed)
        return TextPrompts(self.tokens_per_word, trace.block_tokens, seed)

    def body(self, prompts: PromptMaker, request: TraceRequest, index: int) -> bytes:
        """The JSON of one streamed completion: greedy, exactly the trace's output length where the server can."""
        document = {
            "model": self.model,
            "prompt": prompts.make(request, index),
            "max_tokens": request.output_tokens,
            "temperature": 0.0,
            "stream": True,
            **self.extras,
        }
        return json.dumps(document, separators=(",", ":")).encode()

    def describe(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "max_model_len": self.max_model_len,
            "prompts": "token ids" if self.vocabulary else f"text, {self.tokens_per_word:.2f} tokens per word",
            "vocabulary": len(self.vocabulary),
            "exact_lengths": self.exact_tokens,
        }


async def learn(client: Client, *, model: str | None, vocab: int | None = None, text: bool = False) -> Server:
    """Ask the server. ``vocab``: draw token ids below this number; ``text``: use text prompts whatever it offers.

    Raises ServerError when nothing answers, the model is not there, or no form of request is accepted.
    """
    try:
        name, max_model_len, listed_vocab = await _model(client, model)
        vocabulary: tuple[int, ...] = ()
        if not text:
            size = vocab or listed_vocab
            vocabulary = tuple(range(size // 16, size)) if size else await _tokenized(client, name)
        server, refusal = await _first_accepted(client, name, max_model_len, vocabulary)
        if server is None:
            raise ServerError(f"{client.endpoint.url} takes no completion request: {refusal}")
    except (OSError, WireError) as error:
        raise ServerError(f"no OpenAI-compatible server answers at {client.endpoint.url}: {trouble(error)}") from None
    return server


async def _model(client: Client, wanted: str | None) -> tuple[str, int | None, int | None]:
    answer = await client.call("GET", "/v1/models")
    body = answer.json()
    listed = body.get("data") if isinstance(body, dict) else None
    rows = [row for row in listed if isinstance(row, dict) and "id" in row] if isinstance(listed, list) else []
    if answer.status != 200 or not rows:
        if wanted is not None:
            return wanted, None, None
        raise ServerError(f"{client.endpoint.url}/v1/models lists no model (status {answer.status}): name it yourself")
    for row in rows:
        if wanted is None or row["id"] == wanted:
            return str(row["id"]), _count(row.get("max_model_len")), _count(row.get("vocab_size"))
    names = ", ".join(str(row["id"]) for row in rows[:5])
    raise ServerError(f"{client.endpoint.url} has no model {wanted!r}; it lists: {names}")


async def _tokenized(client: Client, model: str) -> tuple[int, ...]:
    """Distinct ids of ordinary text, when the server tokenizes: valid, and none of them special."""
    text = " ".join(WORDS)
    answer = await client.call("POST", "/tokenize", {"model": model, "prompt": text, "add_special_tokens": False})
    body = answer.json()
    tokens = body.get("tokens") if answer.status == 200 and isinstance(body, dict) else None
    if not isinstance(tokens, list) or not all(isinstance(token, int) for token in tokens):
        return ()
    ids = tuple(sorted(set(tokens)))
    return ids if len(ids) >= _MIN_VOCABULARY else ()


async def _first_accepted(
    client: Client, model: str, max_model_len: int | None, vocabulary: tuple[int, ...]
) -> tuple[Server | None, str]:
    refusal = ""
    for ids in (vocabulary, ()) if vocabulary else ((),):
        for extras in (_RICH, _EXACT, _PLAIN, {}):
            prompt: list[int] | str = list(ids[:8]) if ids else " ".join(WORDS[:64])
            document = {"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, **extras}
            # A server of ours that records its traffic leaves out what is marked so.
            probe = ((PROBE_HEADER, "1"),)
            answer = await client.call("POST", "/v1/completions", _unstreamed(document), probe)
            if answer.status == 200:
                per_word = 1.0 if ids else _tokens_per_word(answer)
                return Server(model, max_model_len, ids, per_word, extras), ""
            refusal = f"status {answer.status}: {answer.error()}"
            if answer.status not in {400, 404, 422}:
                return None, refusal
    return None, refusal


def _unstreamed(document: dict[str, Any]) -> dict[str, Any]:
    """Stream options are refused without a stream, so a probe that wants a whole answer leaves them out."""
    return {key: value for key, value in document.items() if key != "stream_options"}


def _tokens_per_word(answer: Answer) -> float:
    body = answer.json()
    usage = body.get("usage") if isinstance(body, dict) else None
    counted = _count(usage.get("prompt_tokens")) if isinstance(usage, dict) else None
    return 1.3 if counted is None else counted / 64


def _count(value: Any) -> int | None:
    return token_count(value) or None
