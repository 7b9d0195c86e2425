"""The chunks that are written by hand are, key for key and byte for byte, the documents that they stand for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine.detokenizer import ByteDetokenizer
from engine.plan import TokenLogprobs
from engine.request import Request, SamplingParams
from engine.server.intake import Ask
from engine.server.openai import ChatShape, CompletionShape
from engine.server.output import Answer, Piece

ASK = Ask(Request("r-1", [1, 2], SamplingParams(max_tokens=9), 0), stream=True)
LOGPROBS = [TokenLogprobs(5, -0.5, 1, ((5, -0.5),))]


def answer(ask: Ask) -> Answer:
    return Answer(ask, ByteDetokenizer(lambda token: bytes([token])), lambda _: False)


@pytest.mark.parametrize("shape", [CompletionShape, ChatShape])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"include_usage": True},
        {"include_usage": True, "continuous_usage": True},
        {"return_token_ids": True},
        {"num_logprobs": 1},
        {"echo_text": "again"},
    ],
)
@pytest.mark.parametrize("finish_reason", [None, "length"])
@pytest.mark.parametrize("text", ["", "plain", 'quotes " and \\', "\n\t\x01\x7f", "ünï€\U0001f600\u2028"])
def test_chunks_are_their_documents(shape: Any, changes: dict[str, Any], finish_reason: str | None, text: str) -> None:
    ask = replace(ASK, **changes)
    pieces = [Piece(text, [5], LOGPROBS, finish_reason=None), Piece(text, [5], LOGPROBS, finish_reason=finish_reason)]
    one, other = (shape(ask, 'a "model"', 7, str) for _ in range(2))
    for piece in pieces:
        document = one.chunk(answer(ask), piece)
        expected = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
        assert other.chunk_text(answer(ask), piece) == expected
