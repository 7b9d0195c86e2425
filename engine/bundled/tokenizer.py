"""Train the bundled model's tokenizer: byte-level BPE whose digits are always single tokens.

Splitting digits keeps numbers copyable one symbol at a time, which is what the retrieval tasks measure.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

BOS = "<|bos|>"
PAD = "<|pad|>"
END = "<|end|>"
SYSTEM = "<|system|>"
USER = "<|user|>"
ASSISTANT = "<|assistant|>"
SPECIAL_TOKENS = (BOS, PAD, END, SYSTEM, USER, ASSISTANT)

# One turn is "<|role|>\ntext<|end|>\n"; the generation prompt opens an assistant turn.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Fit a byte-level BPE of exactly ``vocab_size`` entries (special tokens first, then the 256 bytes)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_paragraphs(texts), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        special_tokens=[(BOS, token_id(tokenizer, BOS))],
    )
    return tokenizer


def _paragraphs(texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        yield from text.split("\n\n")


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Id of one vocabulary entry. Raises ValueError when the vocabulary lacks it."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise ValueError(f"the vocabulary has no entry {token!r}")
    return int(found)


def byte_token_ids(tokenizer: Tokenizer) -> list[int]:
    """Ids of the 256 single-byte tokens, ascending."""
    return sorted(token_id(tokenizer, symbol) for symbol in pre_tokenizers.ByteLevel.alphabet())


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """Write ``tokenizer.json`` and a Hugging Face style ``tokenizer_config.json`` into ``folder``."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
