"""Token ids to text, one token at a time, so that what was sent never has to be taken back.

Byte-level vocabularies (and sentence pieces with byte fallback) say which bytes each token stands for: an incremental
UTF-8 decoder then holds back exactly the bytes of an unfinished character and nothing else. For any other vocabulary
the text of a short window of tokens is compared before and after each token.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so an unfinished one has at most three tokens.
_MAX_UNFINISHED_TOKENS = 3


class Detokenizer(Protocol):
    """Turns a growing list of ids into text."""

    def feed(self, token_id: int) -> str:
        """Text that is certain after this token; empty while a character is unfinished. Never raises on bad bytes."""
        ...

    def flush(self) -> str:
        """The rest at the end of the stream: U+FFFD for an unfinished character, else nothing."""
        ...


class ByteDetokenizer:
    """For vocabularies whose tokens stand for bytes.

    ``token_bytes`` gives them; empty for special tokens, which do not appear in text. ``strip_leading_space`` drops one
    space at the very start.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], *, strip_leading_space: bool = False) -> None:
        self._token_bytes = token_bytes
        self._strip = strip_leading_space
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_id: int) -> str:
        return self._stripped(self._decoder.decode(self._token_bytes(token_id)))

    def flush(self) -> str:
        text = self._stripped(self._decoder.decode(b"", final=True))
        self._decoder.reset()
        return text

    def _stripped(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


class WindowDetokenizer:
    """For any vocabulary, given only ``decode(ids) -> text`` that skips special tokens."""

    def __init__(self, decode: Callable[[Sequence[int]], str], context_ids: Sequence[int] = ()) -> None:
        """``context_ids``: the last ids before the text, on which the spelling of its first token may depend."""
        self._decode = decode
        self._ids: list[int] = list(context_ids)
        self._context = 0  # ids from here are decoded, because the text of a token may depend on the one before it
        self._sent = len(self._ids)  # ids before this one have been given out

    def feed(self, token_id: int) -> str:
        self._ids.append(token_id)
        before, after = self._text(self._sent), self._text(len(self._ids))
        pending = len(self._ids) - self._sent
        if after.endswith(REPLACEMENT):
            # Only the last three tokens can still belong to an unfinished character; what precedes them is bad.
            return self._advance(before, pending - _MAX_UNFINISHED_TOKENS) if pending > _MAX_UNFINISHED_TOKENS else ""
        return self._advance(before, pending) if len(after) > len(before) else ""

    def flush(self) -> str:
        return self._advance(self._text(self._sent), len(self._ids) - self._sent)

    def _text(self, stop: int) -> str:
        return self._decode(self._ids[self._context : stop])

    def _advance(self, before: str, num_tokens: int) -> str:
        """Give out the text of the next tokens, given the text of those before them in the window."""
        text = self._text(self._sent + num_tokens)[len(before) :]
        # The tokens just given out are the next window's context; what precedes them is never looked at again.
        del self._ids[: self._sent]
        self._context, self._sent = 0, num_tokens
        return text
