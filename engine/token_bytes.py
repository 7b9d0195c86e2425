"""Which bytes each token of a vocabulary stands for, read from ``tokenizer.json``, to stream text exactly.

Two kinds of vocabulary are known: byte-level (GPT-2's printable alphabet for bytes; Llama 3, Qwen) and sentence pieces
with byte fallback (``▁`` for a space, ``<0x0A>`` for a byte; Llama 2, Mistral).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.detokenizer import ByteDetokenizer, Detokenizer, WindowDetokenizer
from engine.json_text import load_json

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_CONTEXT_TOKENS = 8


def byte_alphabet() -> dict[str, int]:
    """GPT-2's mapping of printable characters to bytes (Radford et al. 2019): printable Latin-1 stands for itself,
    the other 68 bytes follow from U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def vocabulary_bytes(document: Mapping[str, Any]) -> dict[int, bytes] | None:
    """Bytes by token id of a ``tokenizer.json`` document, special tokens empty; None for another kind of vocabulary."""
    decoders = _decoders(document.get("decoder"))
    kinds = {str(decoder.get("type")) for decoder in decoders}
    vocabulary = (document.get("model") or {}).get("vocab")
    if not isinstance(vocabulary, Mapping):
        return None
    if kinds == {"ByteLevel"}:
        alphabet = byte_alphabet()

        def piece_bytes(piece: str) -> bytes:
            if all(character in alphabet for character in piece):
                return bytes(alphabet[character] for character in piece)
            return piece.encode()

    elif "ByteFallback" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:

        def piece_bytes(piece: str) -> bytes:
            match = _BYTE_PIECE.fullmatch(piece)
            return bytes([int(match[1], 16)]) if match else piece.replace("\u2581", " ").encode()

    else:
        return None
    table = {int(token_id): piece_bytes(piece) for piece, token_id in vocabulary.items()}
    for added in document.get("added_tokens") or ():
        table[int(added["id"])] = b"" if added.get("special") else piece_bytes(str(added["content"]))
    return table


def detokenizer_factory(
    folder: str | Path, decode: Callable[[Sequence[int]], str]
) -> Callable[[Sequence[int]], Detokenizer]:
    """A maker of detokenizers for the model in ``folder``, given the ids that come before the text to decode.

    ``decode`` serves vocabularies that do not say their bytes.
    """
    document = load_json((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    table = vocabulary_bytes(document)
    if table is None:
        return lambda context: WindowDetokenizer(decode, context[-_CONTEXT_TOKENS:])
    # Generated text continues a prompt, so its leading space is text and stays.
    return lambda context: ByteDetokenizer(lambda token_id: table.get(token_id, b""), strip_leading_space=not context)


def _decoders(decoder: object) -> list[Mapping[str, Any]]:
    if not isinstance(decoder, Mapping):
        return []
    if decoder.get("type") == "Sequence":
        return [part for part in decoder.get("decoders") or () if isinstance(part, Mapping)]
    return [decoder]
