"""The shapes of OpenAI's completions and chat answers, whole and in chunks, with vLLM's additions where asked for."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from json.encoder import encode_basestring
from typing import Any, Protocol

from engine.plan import TokenLogprobs
from engine.server.intake import Ask
from engine.server.output import Answer, Piece

Json = dict[str, Any]
TokenText = Callable[[int], str]
# JSON has no infinity; this is what OpenAI and vLLM send for a token that cannot be.
_LEAST_LOGPROB = -9999.0
# Ends of the chunks that tell of text alone, in the order of keys that the documents below have.
_PLAIN_END = ',"finish_reason":null,"stop_reason":null}]}'
_PLAIN_END_NULL_USAGE = _PLAIN_END[:-1] + ',"usage":null}'
_PLAIN_CHAT_END = ',"finish_reason":null}]}'
_PLAIN_CHAT_END_NULL_USAGE = _PLAIN_CHAT_END[:-1] + ',"usage":null}'


class Shape(Protocol):
    """One endpoint's way to show an answer."""

    def first_chunk(self, answer: Answer) -> Json | None:
        """Sent before any token, where the protocol has such a chunk."""
        ...

    def chunk(self, answer: Answer, piece: Piece) -> Json: ...

    def chunk_text(self, answer: Answer, piece: Piece) -> str:
        """The JSON of :meth:`chunk`, written by hand for the usual ones: an answer has one per token."""
        ...

    def usage_chunk(self, answer: Answer) -> Json: ...

    def whole(self, answer: Answer, piece: Piece) -> Json: ...


def usage(answer: Answer) -> Json:
    counts: Json = {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
        "evicted_tokens": answer.evicted_tokens,
    }
    if answer.pinned_tokens is not None:  # 0: the wish was not met
        counts["pinned_tokens"] = answer.pinned_tokens
    return counts


class CompletionShape:
    """``text_completion`` objects. Keeps the text offset of log-probabilities between chunks."""

    def __init__(self, ask: Ask, model: str, created_s: int, token_text: TokenText) -> None:
        self._ask = ask
        self._head: Json = {
            "id": f"cmpl-{ask.request.request_id}",
            "object": "text_completion",
            "created": created_s,
            "model": model,
        }
        self._token_text = token_text
        self._offset = 0
        self._is_first = True
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._is_plain = _is_plain(ask)
        self._begin = _text(self._head)[:-1] + ',"choices":[{"index":0,"text":'

    def first_chunk(self, answer: Answer) -> Json | None:  # noqa: ARG002 - a Shape
        return None

    def chunk(self, answer: Answer, piece: Piece) -> Json:
        return self._document(answer, piece, continuous=True)

    def chunk_text(self, answer: Answer, piece: Piece) -> str:
        if not self._is_plain or piece.finish_reason is not None:
            return _text(self.chunk(answer, piece))
        ending = _PLAIN_END_NULL_USAGE if self._ask.include_usage else _PLAIN_END
        return f'{self._begin}{encode_basestring(piece.text)},"logprobs":null{ending}'

    def usage_chunk(self, answer: Answer) -> Json:
        return {**self._head, "choices": [], "usage": usage(answer)}

    def whole(self, answer: Answer, piece: Piece) -> Json:
        return {**self._document(answer, piece, continuous=False), "usage": usage(answer)}

    def _document(self, answer: Answer, piece: Piece, *, continuous: bool) -> Json:
        ask, text, logprobs = self._ask, piece.text, None
        is_first, self._is_first = self._is_first, False
        self._prompt_logprobs += piece.prompt_logprobs
        if ask.num_logprobs is not None:
            logprobs = self._logprobs(piece, with_prompt=is_first and ask.echo_text is not None)
        if is_first and ask.echo_text is not None:
            text = ask.echo_text + text
        choice: Json = {
            "index": 0,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        if ask.num_prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(self._prompt_logprobs, self._token_text)
        if ask.return_token_ids:
            choice["token_ids"] = piece.token_ids
            if is_first:
                choice["prompt_token_ids"] = ask.request.prompt_ids
        document = {**self._head, "choices": [choice]}
        return _with_running_usage(document, ask, answer) if continuous else document

    def _logprobs(self, piece: Piece, *, with_prompt: bool) -> Json:
        tokens: list[tuple[int, TokenLogprobs | None]] = [(entry.token_id, entry) for entry in piece.logprobs]
        if with_prompt:
            scored: list[TokenLogprobs | None] = [None, *self._prompt_logprobs]
            tokens = [*zip(self._ask.request.prompt_ids, scored, strict=False), *tokens]
        texts, values, tops, offsets = [], [], [], []
        for token_id, entry in tokens:
            text = self._token_text(token_id)
            texts.append(text)
            values.append(None if entry is None else _finite(entry.logprob))
            tops.append(None if entry is None else self._top(entry))
            offsets.append(self._offset)
            self._offset += len(text)
        return {"tokens": texts, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        # The chosen token is always listed, as OpenAI does: there may be one more entry than asked for.
        top = entry.top[: self._ask.num_logprobs] if self._ask.num_logprobs else ()
        listed = {self._token_text(token_id): _finite(logprob) for token_id, logprob in top}
        return {**listed, self._token_text(entry.token_id): _finite(entry.logprob)}


class ChatShape:
    """``chat.completion`` and ``chat.completion.chunk`` objects."""

    def __init__(self, ask: Ask, model: str, created_s: int, token_text: TokenText) -> None:
        self._ask = ask
        self._id = f"chatcmpl-{ask.request.request_id}"
        self._created_s = created_s
        self._model = model
        self._token_text = token_text
        self._is_first = True
        self._is_plain = _is_plain(ask)
        self._begin = _text(self._head("chat.completion.chunk"))[:-1] + ',"choices":[{"index":0,"delta":{"content":'

    def first_chunk(self, answer: Answer) -> Json | None:
        choice = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        document = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._ask.return_token_ids:
            document["prompt_token_ids"] = self._ask.request.prompt_ids
        return _with_running_usage(document, self._ask, answer)

    def chunk(self, answer: Answer, piece: Piece) -> Json:
        choice: Json = {
            "index": 0,
            "delta": {"content": piece.text},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
        }
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        if self._ask.return_token_ids:
            choice["token_ids"] = piece.token_ids
        document = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self._ask.num_prompt_logprobs is not None and self._is_first:
            document["prompt_logprobs"] = prompt_logprobs(piece.prompt_logprobs, self._token_text)
        self._is_first = False
        return _with_running_usage(document, self._ask, answer)

    def chunk_text(self, answer: Answer, piece: Piece) -> str:
        if not self._is_plain or piece.finish_reason is not None:
            return _text(self.chunk(answer, piece))
        ending = _PLAIN_CHAT_END_NULL_USAGE if self._ask.include_usage else _PLAIN_CHAT_END
        return f'{self._begin}{encode_basestring(piece.text)}}},"logprobs":null{ending}'

    def usage_chunk(self, answer: Answer) -> Json:
        return {**self._head("chat.completion.chunk"), "choices": [], "usage": usage(answer)}

    def whole(self, answer: Answer, piece: Piece) -> Json:
        choice: Json = {
            "index": 0,
            "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._logprobs(piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }
        document = {**self._head("chat.completion"), "choices": [choice], "usage": usage(answer)}
        if self._ask.return_token_ids:
            choice["token_ids"] = piece.token_ids
            document["prompt_token_ids"] = self._ask.request.prompt_ids
        if self._ask.num_prompt_logprobs is not None:
            document["prompt_logprobs"] = prompt_logprobs(piece.prompt_logprobs, self._token_text)
        return document

    def _head(self, kind: str) -> Json:
        return {"id": self._id, "object": kind, "created": self._created_s, "model": self._model}

    def _logprobs(self, piece: Piece) -> Json | None:
        if self._ask.num_logprobs is None:
            return None
        content = []
        for entry in piece.logprobs:
            top = entry.top[: self._ask.num_logprobs] if self._ask.num_logprobs else ()
            row = self._row(entry.token_id, entry.logprob)
            content.append({**row, "top_logprobs": [self._row(token_id, value) for token_id, value in top]})
        return {"content": content, "refusal": None}

    def _row(self, token_id: int, logprob: float) -> Json:
        text = self._token_text(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": list(text.encode())}


def prompt_logprobs(scored: Sequence[TokenLogprobs], token_text: TokenText) -> list[Json | None]:
    """One entry per prompt token, None for the first, keyed by token id as vLLM does."""
    rows: list[Json | None] = [None]
    for entry in scored:
        row: Json = {}
        for rank, (token_id, logprob) in enumerate(entry.top, start=1):
            row[str(token_id)] = {"logprob": _finite(logprob), "rank": rank, "decoded_token": token_text(token_id)}
        row[str(entry.token_id)] = {
            "logprob": _finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": token_text(entry.token_id),
        }
        rows.append(row)
    return rows


def _with_running_usage(document: Json, ask: Ask, answer: Answer) -> Json:
    if ask.include_usage:
        document["usage"] = usage(answer) if ask.continuous_usage else None
    return document


def _is_plain(ask: Ask) -> bool:
    """Whether its chunks differ in nothing but their text, until the last one."""
    wants = (ask.num_logprobs, ask.num_prompt_logprobs, ask.echo_text)
    return all(want is None for want in wants) and not (ask.return_token_ids or ask.continuous_usage)


def _text(document: Json) -> str:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"))


def _finite(logprob: float) -> float:
    return max(_LEAST_LOGPROB, logprob)
