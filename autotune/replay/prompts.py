"""Prompts of given lengths in which what the trace shares is shared on the wire. numpy, no torch.

Every hash id stands for the same tokens wherever it occurs; what follows the last whole block is the request's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from envs.workload.prefixes import segments
from envs.workload.trace import TraceRequest

WORDS: Final = (
    "the of and to in that was his he it with is for as had you not be her on at by which have or from this him but "
    "all she they were my are me one their so an said them we who would been will no when there if more out up into do "
    "any your what has man could other than our some very time upon about may its only now like little then can made "
    "should did us such great before must two these see know over much down after first good men own never most old "
    "shall day where those came come himself way work life without go make well through being long say might how am "
    "too even again many back here think every people went same last thought away under take found hand eyes still "
    "place while just also young yet though against things get ever give god years off face nothing right once another "
    "left part saw house world head three took new love always mr put night each king between tell mind heart few "
    "because thing whom far seemed looked called whole de set both got find done heard look name days told let lord "
    "country asked going seen better having home knew side something moment father among course hands woman enough "
    "words mother soon full end gave room almost small thou cannot water want however light quite brought nor word "
    "whose given door best turned taken does use morning myself felt until since power themselves used rather began"
).split()


class PromptMaker(Protocol):
    """Makes the prompt of the request at ``index``: token ids or text."""

    def make(self, request: TraceRequest, index: int) -> list[int] | str: ...


@dataclass(frozen=True)
class TokenPrompts:
    """Prompts as token ids drawn from ``vocabulary``, exactly as long as asked. ``block_tokens``: see Trace."""

    vocabulary: tuple[int, ...]
    block_tokens: float
    seed: int = 0

    def make(self, request: TraceRequest, index: int) -> list[int]:
        ids: list[int] = []
        for kind, key, length in segments(request, index, self.block_tokens):
            drawn = np.random.default_rng((self.seed, kind, key)).integers(len(self.vocabulary), size=length)
            ids.extend(self.vocabulary[i] for i in drawn)
        return ids


@dataclass(frozen=True)
class TextPrompts:
    """Prompts as text for servers that take no token ids; lengths hold on average.

    ``tokens_per_word`` is measured on the server (a leading blank belongs to its word).
    """

    tokens_per_word: float
    block_tokens: float
    seed: int = 0

    def make(self, request: TraceRequest, index: int) -> str:
        words: list[str] = []
        for kind, key, length in segments(request, index, self.block_tokens):
            number = max(1, round(length / self.tokens_per_word))
            drawn = np.random.default_rng((self.seed, kind, key)).integers(len(WORDS), size=number)
            words.extend(WORDS[i] for i in drawn)
        return " ".join(words)
