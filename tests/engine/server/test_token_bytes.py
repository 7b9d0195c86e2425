from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.detokenizer import ByteDetokenizer, WindowDetokenizer
from engine.token_bytes import byte_alphabet, detokenizer_factory, vocabulary_bytes

TEXT = "the quick brown fox — naïve café 日本語 👩‍🚀 jumps over the lazy dog\n" * 3


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.add_tokens([AddedToken("[tool] é", special=False)])
    return tokenizer


def sentence_pieces() -> Tokenizer:
    """Llama 2's way: spaces as U+2581, unknown characters as byte pieces."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ("▁", "a", "b", "▁a", "ab", "▁ab", "é"):
        vocabulary[piece] = len(vocabulary)
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return tokenizer


def table_of(tokenizer: Tokenizer) -> dict[int, bytes]:
    table = vocabulary_bytes(json.loads(tokenizer.to_str()))
    assert table is not None
    assert len(table) == tokenizer.get_vocab_size()
    return table


def test_the_alphabet_is_that_of_the_tokenizers_library() -> None:
    assert set(byte_alphabet()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(byte_alphabet().values()) == list(range(256))


BYTE_LEVEL, PIECES = byte_level(), sentence_pieces()


@settings(max_examples=100)
@given(ids=st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1), max_size=30))
def test_byte_level_streams_what_the_library_decodes(ids: list[int]) -> None:
    """Case H.31 with any ids, hence any bytes: the concatenated deltas are the library's decode of the whole."""
    table = table_of(BYTE_LEVEL)
    detokenizer = ByteDetokenizer(table.__getitem__)
    text = "".join(detokenizer.feed(token_id) for token_id in ids) + detokenizer.flush()
    assert text == BYTE_LEVEL.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("text", [TEXT, "a", " ab", "é日本"])
def test_texts_come_back_from_both_kinds(text: str) -> None:
    for tokenizer in (BYTE_LEVEL, PIECES):
        ids = tokenizer.encode(text if tokenizer is BYTE_LEVEL else "▁" + text.replace(" ", "▁")).ids
        detokenizer = ByteDetokenizer(table_of(tokenizer).__getitem__, strip_leading_space=tokenizer is PIECES)
        assert "".join(detokenizer.feed(token_id) for token_id in ids) + detokenizer.flush() == text


def test_special_tokens_are_silent() -> None:
    assert table_of(BYTE_LEVEL)[BYTE_LEVEL.token_to_id("<s>")] == b""
    assert table_of(PIECES)[PIECES.token_to_id("<s>")] == b""


@pytest.mark.parametrize(
    "decoder", [None, {"type": "WordPiece"}, {"type": "Sequence", "decoders": [{"type": "Metaspace"}]}]
)
def test_other_vocabularies_are_decoded_by_window(tmp_path: Path, decoder: Any) -> None:
    document = {"model": {"vocab": {"a": 0}}, "decoder": decoder}
    assert vocabulary_bytes(document) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    new = detokenizer_factory(tmp_path, lambda ids: "a" * len(ids))
    detokenizer = new([0] * 20)
    assert isinstance(detokenizer, WindowDetokenizer)
    assert [detokenizer.feed(0), detokenizer.feed(0), detokenizer.flush()] == ["a", "a", ""]


def test_a_continued_text_keeps_its_leading_space(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(PIECES.to_str())
    new = detokenizer_factory(tmp_path, lambda ids: PIECES.decode(list(ids)))
    piece = PIECES.token_to_id("▁ab")
    assert new([5]).feed(piece) == " ab"
    assert new([]).feed(piece) == "ab"
