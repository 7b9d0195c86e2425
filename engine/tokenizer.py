"""A model folder's tokenizer and chat template, without transformers.

The template is someone else's program: it runs in Jinja's immutable sandbox, with the few helpers that Hugging Face
templates rely on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from engine.errors import EngineError
from engine.json_text import load_json


class ChatTemplateError(ValueError):
    """The messages do not fit the template, or the model has none. ``str`` is for the client."""


class ModelTokenizer:
    """Text to ids and back. Thread safe: nothing changes after construction."""

    def __init__(self, folder: str | Path) -> None:
        """Read ``tokenizer.json`` and, where there are any, ``tokenizer_config.json`` and ``chat_template.jinja``.

        Raises EngineError when the tokenizer is missing or broken.
        """
        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise EngineError(f"{folder} holds no tokenizer.json; download it with the model")
        try:
            self._tokenizer: Any = Tokenizer.from_file(str(path))
        except Exception as error:  # the binding raises plain Exception
            raise EngineError(f"{path} is not a tokenizer ({error}); download it again") from error
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_object(folder / "tokenizer_config.json")
        self._special = {name: text for name in _SPECIAL_NAMES if (text := _token_text(config.get(name))) is not None}
        self._template = _compile(_template_source(folder, config))

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def eos_token_id(self) -> int | None:
        return self.token_to_id(self._special["eos_token"]) if "eos_token" in self._special else None

    @property
    def bos_token_id(self) -> int | None:
        return self.token_to_id(self._special["bos_token"]) if "bos_token" in self._special else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Ids of a text; ``add_special_tokens`` adds what the tokenizer puts around one (a leading BOS, mostly)."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Bytes that are no UTF-8 become U+FFFD; ids outside the vocabulary give nothing."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_to_id(self, token: str) -> int | None:
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's own spelling of a token (byte-level pieces are not text), or None."""
        found = self._tokenizer.id_to_token(token_id)
        return None if found is None else str(found)

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> str:
        """The prompt text of a conversation. Raises ChatTemplateError when there is no template or it objects."""
        if self._template is None:
            raise ChatTemplateError("this model has no chat template; use /v1/completions")
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._special, **variables
            )
        except Exception as error:  # a template can raise anything, and only its own request may suffer
            raise ChatTemplateError(f"the chat template does not accept these messages: {error}") from error
        return str(text)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
    ) -> list[int]:
        """Ids of a conversation; the template itself writes the special tokens."""
        text = self.render_chat(messages, add_generation_prompt=add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)


_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


def _read_object(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return {}
    try:
        data = load_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{path} cannot be read as JSON ({error}); download it again") from error
    return data if isinstance(data, dict) else {}


def _token_text(value: object) -> str | None:
    """Special tokens are written as text or as an object with ``content``."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _template_source(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise EngineError(f"{path} cannot be read ({error}); download it again") from error
    source = config.get("chat_template")
    if isinstance(source, list):  # several named ones
        defaults = [entry for entry in source if isinstance(entry, Mapping) and entry.get("name") == "default"]
        source = defaults[-1].get("template") if defaults else None
    return source if isinstance(source, str) else None


def _compile(source: str | None) -> Any:
    if source is None:
        return None
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise EngineError(f"the model's chat template does not compile ({error}); mend or remove it") from error


def _to_json(value: object, indent: int | None = None, **_options: object) -> str:
    """JSON without HTML escapes, unlike Jinja's own filter: prompts are no web pages."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
