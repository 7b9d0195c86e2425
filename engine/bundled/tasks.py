"""Generated documents that make retrieval, and so the loss from precision and eviction, measurable.

Every generator returns a :class:`Document`: token ids plus one loss weight per token. Text that can be predicted
weighs 1, symbols drawn at random (nothing to learn) weigh little, and the answers weigh more.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from engine.bundled.tokenizer import ASSISTANT, BOS, END, USER, token_id

ANSWER_WEIGHT = 4.0
NOISE_WEIGHT = 0.1
PASSKEY_DIGITS = 5

NAMES = (
    "amber anchor apple arrow badge basin beacon bell birch blade bottle branch bridge brook button cabin candle canal "
    "castle cedar chain chair cherry circle clock cloud coat copper coral corner crown dagger desk door eagle ember "
    "falcon feather fence field flag flute forest fountain garden gate glass glove hammer harbour hat hill horse "
    "ivory jacket jewel kettle ladder lamp lantern leaf lemon letter lion lock maple meadow mirror moon nest oak "
    "ocean olive orchard paper pearl pepper piano pillow planet pocket quill raven ribbon ring river rocket rope rose "
    "saddle sail shell silver sparrow spoon star stone summer table thunder tiger tower train valley velvet wagon "
    "water whistle willow window winter"
).split()


@dataclass
class Document:
    """Token ids with a loss weight each (equal lengths)."""

    ids: list[int] = field(default_factory=list)
    weights: list[float] = field(default_factory=list)

    def add(self, ids: list[int], weight: float = 1.0) -> None:
        self.ids.extend(ids)
        self.weights.extend([weight] * len(ids))


class TaskWriter:
    """Writes documents of an exact or bounded length from one tokenizer, one filler text and one random generator."""

    def __init__(self, tokenizer: Tokenizer, filler: list[int], symbols: list[int], rng: random.Random) -> None:
        """``filler``: token ids of running text; ``symbols``: ids that repeated random sequences are drawn from."""
        self._tokenizer = tokenizer
        self._filler = filler
        self._symbols = symbols
        self._rng = rng
        self._special = {text: token_id(tokenizer, text) for text in (BOS, END, USER, ASSISTANT)}

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def repeated(self, length: int) -> Document:
        """A random sequence repeated until ``length`` tokens are full."""
        document = Document([self._special[BOS]], [0.0])
        period = self._rng.randint(8, max(9, length // 2))
        sequence = self._rng.choices(self._symbols, k=period)
        document.add(sequence, NOISE_WEIGHT)
        while len(document.ids) < length:
            document.add(sequence[: length - len(document.ids)])
        return Document(document.ids[:length], document.weights[:length])

    def passkey(self, length: int, depth: float | None = None, needles: int | None = None) -> Document:
        """Digits hidden in running text and asked for at the end.

        With one needle the wording is "the pass key"; with several, each has a name and all are asked for.
        ``depth`` in [0, 1] places a single needle; None draws it.
        """
        count = needles or self._rng.choice((1, 1, 1, 2, 3))
        names = [""] if count == 1 else [f" of the {name}" for name in self._rng.sample(NAMES, count)]
        keys = ["".join(self._rng.choices("0123456789", k=PASSKEY_DIGITS)) for _ in names]
        hidden = [self._statement(name, key) for name, key in zip(names, keys, strict=True)]
        order = self._rng.sample(range(count), count)
        question = Document()
        self._ask(question, [(names[i], keys[i]) for i in order])
        used = sum(len(piece.ids) for piece in hidden) + len(question.ids) + 3
        gaps = self._split(max(0, length - used), count, depth)
        start = self._rng.randrange(max(1, len(self._filler) - length))
        document = Document([self._special[BOS], self._special[USER], *self.encode("\n")], [0.0, 0.0, 0.0])
        for gap, piece in zip(gaps, [*hidden, question], strict=True):
            document.add(self._filler[start : start + gap])
            start += gap
            document.ids += piece.ids
            document.weights += piece.weights
        return document

    def lookup(self, length: int) -> Document:
        """Lines of name and number, then names to be answered with their numbers."""
        pairs = max(2, min(len(NAMES), (length - 20) // 14))
        pairs = self._rng.randint(max(2, pairs // 3), pairs)
        names = self._rng.sample(NAMES, pairs)
        values = ["".join(self._rng.choices("0123456789", k=4)) for _ in names]
        document = Document([self._special[BOS], self._special[USER]], [0.0, 0.0])
        document.add(self.encode("\nThe ledger holds these numbers.\n"))
        for name, value in zip(names, values, strict=True):
            document.add(self.encode(f"{name}: "), NOISE_WEIGHT)
            document.add(self.encode(value), NOISE_WEIGHT)
            document.add(self.encode("\n"))
        document.add([*self.encode("Read out what is asked."), self._special[END], *self.encode("\n")])
        document.add([self._special[ASSISTANT], *self.encode("\n")])
        for index in self._rng.sample(range(pairs), pairs):
            document.add(self.encode(f"{names[index]}: "), NOISE_WEIGHT)
            document.add(self.encode(values[index]), ANSWER_WEIGHT)
            document.add(self.encode("\n"))
            if len(document.ids) >= length:
                break
        return document

    def tracking(self, length: int) -> Document:
        """Chains of assignments; the value at the end of each chain is asked for."""
        document = Document([self._special[BOS], self._special[USER], *self.encode("\n")], [0.0, 0.0, 0.0])
        chains = max(1, min(8, (length - 20) // 60))
        pool = self._rng.sample(NAMES, chains * 3)
        tails: list[tuple[str, str]] = []
        steps: list[list[tuple[str, str]]] = []
        for chain in range(chains):
            names = pool[3 * chain : 3 * chain + self._rng.randint(1, 3)]
            value = "".join(self._rng.choices("0123456789", k=3))
            steps.append([(names[0], value)])
            steps[-1] += [(name, before) for before, name in itertools.pairwise(names)]
            tails.append((names[-1], value))
        while any(steps):
            name, source = self._rng.choice([chain for chain in steps if chain]).pop(0)
            document.add(self.encode(f"set {name} = {source}"), NOISE_WEIGHT)
            document.add(self.encode(";\n"))
        document.add([*self.encode("Give the values."), self._special[END], *self.encode("\n")])
        document.add([self._special[ASSISTANT], *self.encode("\n")])
        for name, value in self._rng.sample(tails, len(tails)):
            document.add(self.encode(f"{name} = "), NOISE_WEIGHT)
            document.add(self.encode(value), ANSWER_WEIGHT)
            document.add(self.encode("\n"))
        return document

    def text(self, length: int) -> Document:
        """A window of running text."""
        start = self._rng.randrange(max(1, len(self._filler) - length))
        document = Document([self._special[BOS]], [0.0])
        document.add(self._filler[start : start + length - 1])
        return document

    def _statement(self, name: str, key: str) -> Document:
        document = Document()
        document.add(self.encode(f" Keep this in mind: the pass key{name} is "), 0.2)
        document.add(self.encode(key), NOISE_WEIGHT)
        document.add(self.encode("."))
        return document

    def _ask(self, document: Document, asked: list[tuple[str, str]]) -> None:
        names = " and".join(name for name, _ in asked)
        document.add(self.encode(f"\nWhat is the pass key{names}?"), NOISE_WEIGHT)
        document.add([self._special[END], *self.encode("\n"), self._special[ASSISTANT], *self.encode("\n")])
        for name, key in asked:
            document.add(self.encode(f"The pass key{name} is "))
            document.add(self.encode(key), ANSWER_WEIGHT)
            document.add(self.encode(".\n"))
        document.ids[-1] = self._special[END]

    def _split(self, total: int, needles: int, depth: float | None) -> list[int]:
        """Cut ``total`` filler tokens into needles + 1 gaps; the last one always keeps the question apart."""
        if depth is not None and needles == 1:
            before = round(total * depth)
            return [before, total - before]
        cuts = sorted(self._rng.randint(0, total) for _ in range(needles))
        return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]
