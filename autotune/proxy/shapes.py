"""What a proxy can tell of a request and its answer without a tokenizer: prompts, token counts, how it ended.

Counts come from ``usage`` where the server sends it. Else an answer's tokens are its stream chunks with content, or a
quarter of its bytes, and a prompt's a quarter of its bytes: estimates, and marked so.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine.json_text import load_json

Prompt = bytes | list[int]
BYTES_PER_TOKEN: Final = 4
MAX_EVENT_BYTES: Final = 1 << 20
MAX_ANSWER_BYTES: Final = 16 << 20
# What may stand in a recording as the way an answer ended: a server's own words might be anything.
_FINISHES: Final = frozenset({"stop", "length", "tool_calls", "function_call", "content_filter", "abort", "error"})
_MAX_ID: Final = (1 << 32) - 1
_MOST_TOKENS: Final = 1 << 40  # what a server counts beyond that is no count


@dataclass(frozen=True)
class Shape:
    """The prompts of one API call, and how many answers each asks for."""

    prompts: tuple[Prompt, ...]
    answers: int = 1


def request_shape(path: str, body: bytes) -> Shape | None:
    """Of a completion or chat request; None for any other call, and for what is none or is damaged."""
    is_chat = path.endswith("/chat/completions")
    if not is_chat and not path.endswith("/completions"):
        return None
    try:
        document = load_json(body)
    except ValueError:
        return None
    if not isinstance(document, dict):
        return None
    prompts = _chat(document) if is_chat else _completion(document.get("prompt"))
    number = document.get("n")
    answers = number if isinstance(number, int) and not isinstance(number, bool) and 1 <= number <= 128 else 1
    return Shape(tuple(prompts), answers) if prompts else None


def estimated_tokens(prompt: Prompt) -> int:
    """Tokens of a prompt: exact for ids, a quarter of the bytes for text."""
    return len(prompt) if isinstance(prompt, list) else -(-len(prompt) // BYTES_PER_TOKEN)


class AnswerReader:
    """Reads along in an answer, whole or as server-sent events, and keeps only counts. ``usage`` counts may be None."""

    def __init__(self, *, is_stream: bool) -> None:
        self.prompt_tokens: int | None = None
        self.output_tokens: int | None = None
        self.finish: str | None = None
        self.content_events = 0
        self.content_bytes = 0
        self._is_stream = is_stream
        self._rest = bytearray()
        self._overlong = False

    def feed(self, data: bytes) -> None:
        """The next bytes of the body."""
        if not self._is_stream:
            if len(self._rest) + len(data) > MAX_ANSWER_BYTES:
                self._overlong = True
                self.content_bytes += len(data)
                return
            self._rest += data
            return
        lines = data.split(b"\n")
        for line in lines[:-1]:
            self._rest += line
            if not self._overlong:
                self._line(bytes(self._rest))
            self._rest.clear()
            self._overlong = False
        self._rest += lines[-1]
        if len(self._rest) > MAX_EVENT_BYTES:
            self._rest.clear()
            self._overlong = True

    def end(self) -> None:
        """No more comes."""
        if self._is_stream:
            if not self._overlong:
                self._line(bytes(self._rest))
        elif self._overlong:
            self.content_bytes += len(self._rest)
        else:
            self._document(bytes(self._rest))
        self._rest.clear()

    @property
    def estimated_output(self) -> int:
        """Tokens of the answer where no usage came."""
        return self.content_events if self._is_stream else -(-self.content_bytes // BYTES_PER_TOKEN)

    def _line(self, line: bytes) -> None:
        text = line.strip()
        if text.startswith(b"data:") and (data := text[5:].strip()) != b"[DONE]":
            self._document(data)

    def _document(self, data: bytes) -> None:
        try:
            document = load_json(data)
        except ValueError:
            return
        if not isinstance(document, dict):
            return
        usage = document.get("usage")
        if isinstance(usage, dict):
            self.prompt_tokens = _count(usage.get("prompt_tokens"), self.prompt_tokens)
            self.output_tokens = _count(usage.get("completion_tokens"), self.output_tokens)
        choices = document.get("choices")
        for choice in choices if isinstance(choices, list) else ():
            if isinstance(choice, dict):
                self._choice(choice)

    def _choice(self, choice: dict[str, Any]) -> None:
        size = 0
        for part in (choice, choice.get("delta"), choice.get("message")):
            if isinstance(part, dict):
                texts = (part.get(key) for key in ("text", "content", "reasoning_content", "reasoning"))
                size += sum(len(text.encode("utf-8", "replace")) for text in texts if isinstance(text, str))
                if part.get("tool_calls"):
                    size += len(json.dumps(part["tool_calls"]))
        self.content_bytes += size
        self.content_events += size > 0
        finish = choice.get("finish_reason")
        if isinstance(finish, str):
            self.finish = finish if finish in _FINISHES else "other"


def _chat(document: dict[str, Any]) -> list[Prompt]:
    """A chat as one text that grows at its end when a turn is added: tools first, then role and content in order."""
    messages = document.get("messages")
    if not isinstance(messages, list) or not messages:
        return []
    parts = [json.dumps(document["tools"], sort_keys=True)] if document.get("tools") else []
    for message in messages:
        if not isinstance(message, dict):
            return []
        content = message.get("content")
        text = content if isinstance(content, str) else _parts(content)
        calls = json.dumps(message["tool_calls"], sort_keys=True) if message.get("tool_calls") else ""
        parts.append(f"{message.get('role')}\n{text}{calls}\n")
    return ["".join(parts).encode("utf-8", "replace")]


def _parts(content: object) -> str:
    if not isinstance(content, list):
        return ""
    texts = [part["text"] if isinstance(part, dict) and isinstance(part.get("text"), str) else None for part in content]
    return "".join(json.dumps(part) if text is None else text for part, text in zip(content, texts, strict=True))


def _completion(prompt: object) -> list[Prompt]:
    if isinstance(prompt, str):
        return [prompt.encode("utf-8", "replace")]
    if not isinstance(prompt, list) or not prompt:
        return []
    if _are_ids(prompt):
        return [prompt]
    prompts: list[Prompt] = []
    for item in prompt:
        if isinstance(item, str):
            prompts.append(item.encode("utf-8", "replace"))
        elif isinstance(item, list) and _are_ids(item):
            prompts.append(item)
        else:
            return []
    return prompts


def _are_ids(items: Sequence[object]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item <= _MAX_ID for item in items)


def _count(value: object, otherwise: int | None) -> int | None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MOST_TOKENS:
        return otherwise
    return value
