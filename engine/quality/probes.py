"""Retrieval probes: a number hidden in running text is asked for at the end; right means every digit is likeliest.

(The passkey task of Mohtashami and Jaggi 2023.) Models with the bundled tokenizer's turns are asked as they were
trained, others in plain words.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import Tokenizer

from engine.bundled.tasks import ANSWER_WEIGHT, NAMES, PASSKEY_DIGITS, TaskWriter
from engine.bundled.tokenizer import ASSISTANT, BOS, END, USER
from engine.quality.samples import Sample

RETRIEVES = 0.9  # below this share of right answers with the native cache, probes show nothing


def passkeys(
    tokenizer: Tokenizer, filler: Sequence[int], length: int, count: int, rng: random.Random, bos: int | None = None
) -> list[Sample]:
    """``count`` samples of about ``length`` tokens, one number each at a random depth; only the answer is judged.

    ``filler``: token ids of the text around it. ``bos``: put before a plain-worded prompt.
    """
    if all(tokenizer.token_to_id(token) is not None for token in (BOS, END, USER, ASSISTANT)):
        writer = TaskWriter(tokenizer, list(filler), [], rng)
        return [_bundled(writer, length) for _ in range(count)]
    return [_plain(tokenizer, filler, length, rng, bos) for _ in range(count)]


def _bundled(writer: TaskWriter, length: int) -> Sample:
    document = writer.passkey(length, needles=1)
    start = next(i for i, weight in enumerate(document.weights) if weight >= ANSWER_WEIGHT)
    stop = next(i for i in range(start, len(document.ids)) if document.weights[i] < ANSWER_WEIGHT)
    return Sample(tuple(document.ids[:stop]), prompt=start, score_from=start)


def _plain(tokenizer: Tokenizer, filler: Sequence[int], length: int, rng: random.Random, bos: int | None) -> Sample:
    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    name, digits = rng.choice(NAMES), "".join(rng.choices("0123456789", k=PASSKEY_DIGITS))
    statement = encode(f" Keep this in mind: the pass key {name} is {digits}.")
    question = f"\nWhat is the pass key {name}? The pass key {name} is"
    asked, answered = encode(question), encode(f"{question} {digits}")
    # The answer's first token may swallow the end of the question.
    common = next((i for i, pair in enumerate(zip(asked, answered, strict=False)) if pair[0] != pair[1]), len(asked))
    start = [] if bos is None else [bos]
    room = max(0, length - len(start) - len(statement) - len(answered))
    begin = rng.randrange(max(1, len(filler) - room))
    text = list(filler[begin : begin + room])
    depth = rng.randint(0, len(text))
    ids = [*start, *text[:depth], *statement, *text[depth:], *answered]
    prompt = len(ids) - len(answered) + common
    return Sample(tuple(ids), prompt=prompt, score_from=prompt)
