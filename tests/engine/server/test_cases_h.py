"""Cases of section H over HTTP: stops and characters that arrive in pieces, streamed and whole."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.detokenizer import REPLACEMENT, WindowDetokenizer
from engine.request import Request
from engine.server.intake import ServedModel
from engine.token_bytes import byte_alphabet, detokenizer_factory
from engine.tokenizer import ModelTokenizer

Serve = Callable[..., Any]
PATH, CHAT = "/v1/completions", "/v1/chat/completions"
EOS = 257
LETTERS = {byte: letter for letter, byte in byte_alphabet().items()}


def cuts_of(data: bytes) -> list[tuple[bytes, ...]]:
    """Every way to cut up to five bytes; of more every single cut, and the cut into bytes."""
    size = len(data)
    if size <= 5:
        places = [c for n in range(size) for c in itertools.combinations(range(1, size), n)]
    else:
        places = [*((cut,) for cut in range(1, size)), tuple(range(1, size))]
    return [tuple(data[a:b] for a, b in itertools.pairwise((0, *place, size))) for place in places]


TEXTS = ["👩\u200d🚀", "é🇫🇷", "日本語", "e\u0301\u0327", "a😀b"]
GOOD = [pieces for text in TEXTS for pieces in cuts_of(text.encode())]
# Truly bad bytes and ends inside a character, cut anywhere too.
BAD = [
    pieces
    for data in (
        b"a\xffb",
        b"\xc3(",
        b"\xe6\x97",
        b"x\xf0\x9f\x98",
        b"\xed\xa0\x80",
        b"\xc0\xafz",
        "é".encode() + b"\x80",
    )
    for pieces in cuts_of(data)
]
# What it is, the stops, the text in tokens, what may be shown, and the stop that ends it.
STOPS: list[tuple[str, list[str], list[str], str, str | None]] = [
    ("in one piece", ["DEFGHIJ"], ["abc", "DEFGHIJ", "tail"], "abc", "DEFGHIJ"),
    ("the case", ["DEFGHIJ"], ["abc", "DEF", "G", "HI", "J", "tail"], "abc", "DEFGHIJ"),
    ("with text around", ["DEFGHIJ"], ["abcDEF", "G", "HI", "Jtail", "more"], "abc", "DEFGHIJ"),
    ("false starts", ["DEFGHIJ"], ["DEF", "X", "DEF", "G", "X"], "DEFXDEFGX", None),
    ("a false start, then it", ["DEFGHIJ"], ["DEF", "DEF", "G", "HI", "J"], "DEF", "DEFGHIJ"),
    ("a false start at the end", ["DEFGHIJ"], ["abc", "DEF", "G"], "abcDEFG", None),
    ("overlapping", ["DEFGHIJ", "GHIX"], ["DEF", "G", "HI", "X", "J"], "DEF", "GHIX"),
    ("overlapping, the other", ["DEFGHIJ", "GHIX"], ["abc", "DEF", "G", "HI", "J", "X"], "abc", "DEFGHIJ"),
    ("one inside the other", ["EFG", "DEFGHIJ"], ["abc", "DEF", "G", "HI", "J"], "abcD", "EFG"),
    ("one ends the other", ["GHI", "DEFGHI"], ["abc", "DEF", "G", "HI"], "abc", "DEFGHI"),
    ("a character in bytes", ["日本"], ["abc", "日", "本", "x"], "abc", "日本"),
    ("at once", ["DEF"], ["DEF"], "", "DEF"),
]


def spelling(data: bytes) -> str:
    """The token that stands for these bytes in a byte-level vocabulary."""
    return "".join(LETTERS[byte] for byte in data)


def ids_of(pieces: Iterator[bytes] | tuple[bytes, ...] | list[bytes], vocabulary: dict[str, int]) -> list[int]:
    return [vocabulary[spelling(piece)] for piece in pieces]


def split_characters(piece: str) -> list[bytes]:
    """A word as one token; anything beyond ASCII as a token for each byte."""
    return [piece.encode()] if piece.isascii() else [bytes([byte]) for byte in piece.encode()]


@pytest.fixture(scope="module")
def vocabulary() -> dict[str, int]:
    """One token per byte, 256 and 257 special, then a token for each piece that a case needs."""
    table = dict(byte_alphabet())
    wanted = [piece for pieces in (*GOOD, *BAD) for piece in pieces]
    wanted += [data for _, _, words, _, _ in STOPS for word in words for data in split_characters(word)]
    extra = dict.fromkeys(map(spelling, wanted))
    return table | {piece: 258 + i for i, piece in enumerate(piece for piece in extra if piece not in table)}


@pytest.fixture(scope="module", params=["bytes", "window"])
def served(
    request: pytest.FixtureRequest, vocabulary: dict[str, int], tmp_path_factory: pytest.TempPathFactory
) -> ServedModel:
    folder: Path = tmp_path_factory.mktemp("pieces")
    # Specials at 256 and 257 by name; the rest of the vocabulary around them.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary | {"<s>": 256, "</s>": EOS}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    loaded = ModelTokenizer(folder)
    if request.param == "bytes":
        new = detokenizer_factory(folder, loaded.decode)
    else:
        new = lambda context: WindowDetokenizer(loaded.decode, context[-8:])  # noqa: E731 - as the factory has it
    return ServedModel("bytes", loaded, 258 + len(vocabulary), 1024, frozenset({EOS}), new, 1)


class Player:
    """A server whose answers are scripts: the first two prompt tokens say which."""

    def __init__(self, serve: Serve, scripts: list[list[int]]) -> None:
        self._scripts = scripts
        self.server = serve(next_token=self._next)
        self.http = httpx.Client(base_url=self.server.url, timeout=30, trust_env=False)

    def _next(self, request: Request) -> int:
        high, low = (token - 97 for token in request.prompt_ids[:2])
        script = self._scripts[high * 26 + low]
        return [*script, EOS][min(len(request.output_ids), len(script))]

    def ask(self, number: int, *, chat: bool = False, **fields: Any) -> tuple[dict[str, Any], list[str]]:
        """The last choice with the whole text under ``text``, and the deltas (one for an answer in one piece)."""
        name = chr(97 + number // 26) + chr(97 + number % 26)
        body = {"max_tokens": 50, "temperature": 0, "return_token_ids": True, **fields}
        body |= {"messages": [{"role": "user", "content": name}]} if chat else {"prompt": name}
        path = CHAT if chat else PATH
        if fields.get("stream"):
            choices = list(self._chunks(path, body))
            deltas = [choice["delta"].get("content", "") if chat else choice["text"] for choice in choices]
            return {**choices[-1], "text": "".join(deltas)}, deltas
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        return {**choice, "text": text}, [text]

    def _chunks(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """A stream's choices. The engine takes a step when the last one's token has arrived: a chunk for each token."""
        steps = threading.Semaphore(1)
        self.server.engine.runner.before = lambda _plan: steps.acquire(timeout=10)
        try:
            with self.http.stream("POST", path, json=body) as answer:
                assert answer.status_code == 200
                for line in answer.iter_lines():
                    if line.startswith("data: {"):
                        choice = json.loads(line[6:])["choices"][0]
                        yield choice
                        if choice.get("token_ids"):
                            steps.release()
        finally:
            self.server.engine.runner.before = lambda _plan: None
            steps.release(100)


@pytest.fixture
def play(serve: Serve) -> Iterator[Callable[[list[list[int]]], Player]]:
    made: list[Player] = []

    def start(scripts: list[list[int]]) -> Player:
        made.append(Player(serve, scripts))
        return made[-1]

    yield start
    for player in made:
        player.http.close()


@pytest.mark.parametrize("chat", [False, True])
def test_no_piece_of_a_stop_leaves_and_streams_equal_whole_answers(
    play: Callable[[list[list[int]]], Player], vocabulary: dict[str, int], chat: bool
) -> None:
    """vllm-project/vllm#3574: stops in tokens of several letters, false starts, overlaps; the stop shown or not."""
    scripts = [ids_of([d for word in words for d in split_characters(word)], vocabulary) for _, _, words, _, _ in STOPS]
    player = play(scripts)
    for number, (name, stops, _, expected, matched) in enumerate(STOPS):
        for shown in (False, True):
            fields: dict[str, Any] = {"stop": stops, "include_stop_str_in_output": shown, "chat": chat}
            whole, _ = player.ask(number, **fields)
            last, _ = player.ask(number, stream=True, **fields)
            for choice in (whole, last):
                assert choice["text"] == expected + (matched or "") * shown, name
                assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", matched), name
    # A false start is released as soon as a token shows that it was one, not only at the end.
    _, deltas = player.ask(3, stream=True, stop=["DEFGHIJ"], chat=chat)
    assert [delta for delta in deltas if delta] == ["DEFX", "DEFGX"]
    counters = player.server.engine.stats.counters
    assert counters.requests_aborted == counters.requests_failed == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_cut_anywhere_gives_the_text(
    play: Callable[[list[list[int]]], Player], vocabulary: dict[str, int], stream: bool, served: ServedModel
) -> None:
    """Blaizzy/mlx-vlm#1771: every split point; deltas join to the full decode, U+FFFD only for truly bad bytes."""
    cases = [*GOOD, *BAD]
    player = play([ids_of(pieces, vocabulary) for pieces in cases])
    assert len(cases) < 26 * 26
    is_exact = not isinstance(served.new_detokenizer([97]), WindowDetokenizer)
    for number, pieces in enumerate(cases):
        data = b"".join(pieces)
        choice, deltas = player.ask(number, stream=stream)
        text = data.decode("utf-8", "replace")
        assert choice["finish_reason"] == "stop"
        if is_exact or REPLACEMENT not in text:
            assert choice["text"] == text, pieces
        assert choice["text"].replace(REPLACEMENT, "") == text.replace(REPLACEMENT, ""), pieces
        assert choice["text"].count(REPLACEMENT) <= len(data)
        if REPLACEMENT not in text:
            assert not any(REPLACEMENT in delta for delta in deltas), pieces


def test_a_stream_that_ends_inside_a_character_ends_with_one_replacement(
    play: Callable[[list[list[int]]], Player], vocabulary: dict[str, int]
) -> None:
    """Blaizzy/mlx-vlm#1771: max_tokens cuts an emoji after each of its bytes; whole and streamed are the same."""
    player = play([ids_of([bytes([byte]) for byte in "a😀日".encode()], vocabulary)])
    expected = ["a", "a\ufffd", "a\ufffd", "a\ufffd", "a😀", "a😀\ufffd", "a😀\ufffd", "a😀日"]
    for most, text in enumerate(expected, start=1):
        for stream in (False, True):
            choice, _ = player.ask(0, stream=stream, max_tokens=most)
            assert (choice["text"], choice["finish_reason"]) == (text, "length")
