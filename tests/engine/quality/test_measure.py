"""A whole table of a tiny model, the probes' shape, and texts."""

from __future__ import annotations

import gzip
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

import engine
from engine.errors import EngineError
from engine.loader import LoadedModel
from engine.quality.measure import Effort, Text, measure
from engine.quality.probes import passkeys
from engine.quality.settings import bits_per_element
from engine.quality.texts import read_text

EFFORT = Effort(sequences=2, tokens=300, probes=2, probe_tokens=100)
BUNDLED = Path(engine.__file__).parent / "bundled" / "model"


@pytest.fixture(scope="module")
def characters() -> Tokenizer:
    """One token per character, none of the bundled model's turns."""
    alphabet = sorted(set("Keep this in mind: the pass key What is ?0123456789.\n abcdefghijklmnopqrstuvwxyz_"))
    tokenizer = Tokenizer(models.WordLevel({character: i for i, character in enumerate(alphabet)}, unk_token="_"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return tokenizer


def test_a_table_holds_every_setting(loaded: LoadedModel, characters: Tokenizer) -> None:
    rng = random.Random(0)
    text = Text("novel", [rng.randrange(64) for _ in range(1000)])
    seen: dict[str, tuple[int, int]] = {}
    table = measure(
        loaded,
        effort=EFFORT,
        text=text,
        tokenizer=characters,
        progress=lambda stage, done, total: seen.__setitem__(stage, (done, total)),
    )
    assert {"native", "int8", "k8v4", "int4", "window 128"} <= set(table.settings)
    assert set(seen) == {"generating", "generated text", "text", "retrieval probes"}
    assert all(done == total for done, total in seen.values())
    native, int4 = table.settings["native"], table.settings["int4"]
    assert native.generated.after_prompt.kl == 0.0
    assert native.judged.increase_pct == 0.0
    assert int4.text is not None
    assert int4.judged == int4.text.after_prompt
    assert int4.judged.tokens == 2 * 60
    assert int4.judged.kl > 0
    assert int4.bits_per_element < table.settings["int8"].bits_per_element < 32
    assert int4.probes is not None
    assert int4.probes.n == 2
    assert [part is not None for part in int4.generated.by_position] == [True] * 10
    assert table.conditions["text"] == "novel"


def test_the_same_seed_gives_the_same_figures(loaded: LoadedModel) -> None:
    tables = [measure(loaded, effort=EFFORT, seed=seed) for seed in (1, 1, 2)]
    figures = [table.settings["int4"].generated for table in tables]
    assert figures[0] == figures[1] != figures[2]
    assert tables[0].settings["int4"].probes is None
    assert tables[0].settings["int4"].judged == figures[0].after_prompt


def test_bits_count_scales_and_zero_points(loaded: LoadedModel) -> None:
    assert bits_per_element(loaded.groups) == 32.0


def test_plain_probes_hide_the_number_they_ask_for(characters: Tokenizer) -> None:
    filler = [characters.token_to_id("a")] * 500
    samples = passkeys(characters, filler, 200, 5, random.Random(2), bos=3)
    assert len({sample.ids for sample in samples}) == 5
    for sample in samples:
        answer = "".join(characters.id_to_token(token) or "" for token in sample.ids[sample.prompt :])
        prompt = "".join(characters.id_to_token(token) or "" for token in sample.ids[: sample.prompt])
        assert answer.startswith(" ")
        assert answer.strip().isdigit()
        assert f"is{answer}." in prompt
        assert sample.score_from == sample.prompt
        assert len(sample.ids) == 200
        assert sample.ids[0] == 3


def test_the_bundled_tokenizer_is_asked_in_its_own_turns() -> None:
    tokenizer = Tokenizer.from_file(str(BUNDLED / "tokenizer.json"))
    filler = tokenizer.encode("It is a truth universally acknowledged. " * 50, add_special_tokens=False).ids
    (sample,) = passkeys(tokenizer, filler, 200, 1, random.Random(2))
    prompt = tokenizer.decode(list(sample.ids[: sample.prompt]), skip_special_tokens=False)
    answer = tokenizer.decode(list(sample.ids[sample.prompt :]))
    assert "<|assistant|>" in prompt
    assert len(answer) == 5
    assert answer.isdigit()
    assert answer in prompt


def test_a_text_of_less_than_one_sample_is_refused(loaded: LoadedModel) -> None:
    """It would be left out, and what is generated be shown in its place."""
    with pytest.raises(EngineError, match=r"haiku: 299 tokens of text are less than one sample of 300"):
        measure(loaded, effort=EFFORT, text=Text("haiku", [1] * 299))


def test_texts_of_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"two"))
    (tmp_path / "c.md").write_text("no")
    assert read_text(tmp_path) == ("a.txt, b.txt.gz", "one\ntwo")
    assert read_text(tmp_path, "b") == ("b.txt.gz", "two")
    with pytest.raises(EngineError, match=r"begins with 'c'; there are a\.txt, b\.txt\.gz"):
        read_text(tmp_path, "c")
    assert read_text(tmp_path / "a.txt") == ("a.txt", "one")
    packed = gzip.compress(b"two" * 100)
    for broken in (b"broken", packed[:-9], packed[:12] + b"\xff" * 20 + packed[12:]):
        (tmp_path / "b.txt.gz").write_bytes(broken)
        with pytest.raises(EngineError, match="cannot be read"):
            read_text(tmp_path)
    with pytest.raises(EngineError, match="no such file or folder"):
        read_text(tmp_path / "nowhere")
