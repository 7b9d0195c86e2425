"""Tokenizer folders: encoding, decoding, chat templates in their sandbox, and broken files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.bundled.tokenizer import save_tokenizer, train_tokenizer
from engine.errors import EngineError
from engine.tokenizer import ChatTemplateError, ModelTokenizer

TEXT = "It is a truth universally acknowledged, that 42 men must be in want of 7 wives. 🙂 naïve\n\n" * 3
CHAT = [{"role": "user", "content": "Hello\nthere"}]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer([TEXT], 300), folder, 4096)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    for path in made.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def configure(folder: Path, **changes: Any) -> ModelTokenizer:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return ModelTokenizer(folder)


@pytest.mark.parametrize("text", ["", " ", TEXT, "a🙂é 日本", "\x00\x7f", "1234567"])
def test_round_trip(made: Path, text: str) -> None:
    tokenizer = ModelTokenizer(made)
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode(text, add_special_tokens=False) == ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|>" + text


def test_vocabulary(made: Path) -> None:
    tokenizer = ModelTokenizer(made)
    assert tokenizer.vocab_size == 300
    assert tokenizer.eos_token_id == tokenizer.token_to_id("<|end|>")
    assert tokenizer.id_to_token(0) == "<|bos|>"
    assert tokenizer.id_to_token(10_000) is None
    assert tokenizer.token_to_id("no such token") is None
    assert tokenizer.decode([10_000]) == ""


def test_long_texts_are_not_cut(folder: Path) -> None:
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text())
    data["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    path.write_text(json.dumps(data))
    assert len(ModelTokenizer(folder).encode(TEXT)) > 20


def test_chat_template(made: Path) -> None:
    tokenizer = ModelTokenizer(made)
    assert tokenizer.has_chat_template
    opened = "<|bos|><|user|>\nHello\nthere<|end|>\n"
    assert tokenizer.render_chat(CHAT) == opened + "<|assistant|>\n"
    assert tokenizer.render_chat(CHAT, add_generation_prompt=False) == opened
    ids = tokenizer.encode_chat(CHAT)
    assert ids.count(tokenizer.bos_token_id or 0) == 1
    assert tokenizer.decode(ids, skip_special_tokens=False) == opened + "<|assistant|>\n"


def test_template_file_and_named_templates(folder: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "{{ messages[0].content }}!"}]
    assert configure(folder, chat_template=named).render_chat(CHAT) == "Hello\nthere!"
    odd = [{"name": ["default"], "template": "no"}, "default", {"name": "default", "template": "yes"}]
    assert configure(folder, chat_template=odd).render_chat(CHAT) == "yes"
    (folder / "chat_template.jinja").write_text("{{ messages | tojson }} {{ extra }}")
    text = ModelTokenizer(folder).render_chat([{"role": "user", "content": "<é>"}], extra=3)
    assert text == '[{"role": "user", "content": "<é>"}] 3'


def test_special_tokens_may_be_objects(folder: Path) -> None:
    tokenizer = configure(folder, bos_token={"content": "<|pad|>"}, eos_token=None)
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id is None


def test_a_model_without_a_template_says_so(folder: Path) -> None:
    tokenizer = configure(folder, chat_template=None)
    assert not tokenizer.has_chat_template
    with pytest.raises(ChatTemplateError, match="/v1/completions"):
        tokenizer.render_chat(CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages[5].content.strip() }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 // 0 }}",
    ],
)
def test_a_template_that_objects_or_misbehaves_is_a_clean_error(folder: Path, template: str) -> None:
    tokenizer = configure(folder, chat_template=template)
    with pytest.raises(ChatTemplateError, match="does not accept"):
        tokenizer.render_chat(CHAT)


def test_broken_folders_are_one_line(folder: Path) -> None:
    with pytest.raises(EngineError, match="chat template does not compile"):
        configure(folder, chat_template="{% for %}")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(EngineError, match=r"chat_template\.jinja cannot be read"):
        ModelTokenizer(folder)
    (folder / "chat_template.jinja").unlink()
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(EngineError, match="cannot be read as JSON"):
        ModelTokenizer(folder)
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(EngineError, match="cannot be read as JSON"):
        ModelTokenizer(folder)
    (folder / "tokenizer_config.json").unlink()
    assert not ModelTokenizer(folder).has_chat_template
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(EngineError, match="is not a tokenizer"):
        ModelTokenizer(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(EngineError, match=r"holds no tokenizer\.json"):
        ModelTokenizer(folder)
