"""Measures the quality table of a loaded model."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from tokenizers import Tokenizer

from engine.clock import Clock, RealClock
from engine.errors import EngineError
from engine.formats import FORMAT_BY_NAME
from engine.loader import LoadedModel
from engine.machine_info import machine_info
from engine.offline import generate
from engine.quality.compare import NATIVE, Outcome, Settings, compare
from engine.quality.digest import model_digest
from engine.quality.probes import passkeys
from engine.quality.samples import Sample, windows
from engine.quality.scoring import Conditions
from engine.quality.settings import bits_per_element, eviction_settings, format_settings
from engine.quality.table import Model, Probes, QualityTable, Row, Scores, Source
from engine.quality.tally import Figures, Tally
from engine.request import SamplingParams
from kernels import ops

Progress = Callable[[str, int, int], None]

_PARTS = 10  # equal parts of a sample; the prompt takes the first eight
_PROMPT_PARTS = 8
_POOL_BYTES_PER_TOKEN_MARGIN = 2


@dataclass(frozen=True)
class Effort:
    """How much is measured: samples of ``tokens`` tokens (less if the model takes less), and probes."""

    sequences: int = 16
    tokens: int = 1280
    probes: int = 64
    probe_tokens: int = 1024

    @classmethod
    def quick(cls) -> Effort:
        """For a first look; its errors are twice as large."""
        return cls(sequences=4, tokens=640, probes=16, probe_tokens=512)


@dataclass(frozen=True)
class Text:
    """Running text that the model was not trained on."""

    name: str
    ids: Sequence[int]


def measure(
    loaded: LoadedModel,
    *,
    effort: Effort | None = None,
    text: Text | None = None,
    tokenizer: Tokenizer | None = None,
    bos: int | None = None,
    seed: int = 0,
    clock: Clock | None = None,
    progress: Progress | None = None,
) -> QualityTable:
    """Every format, and every eviction that a prompt of this length shows, against the native cache.

    Generated text is sampled from the model itself at temperature 1, where the perplexity that a setting adds is the
    divergence that it causes. Without ``tokenizer`` there are no probes. ``progress``: stage, tokens done, tokens in
    all. Raises EngineError where the model is too small for its samples or memory too small for the caches.
    """
    effort, clock, show = effort or Effort(), clock or RealClock(), progress or _silent
    part = min(effort.tokens, loaded.config.max_model_len) // _PARTS
    length, prompt = part * _PARTS, part * _PROMPT_PARTS
    if not part:
        raise EngineError(f"this model takes {loaded.config.max_model_len} tokens, too few to measure anything")
    pieces = windows(text.ids, length, effort.sequences, bos) if text is not None else []
    if text is not None and not pieces:
        raise EngineError(
            f"{text.name}: {len(text.ids)} tokens of text are less than one sample of {length}; give more"
        )
    settings: Settings = {**format_settings(), **eviction_settings(prompt)}
    ops.warm_up(loaded.model.device, loaded.model.dtype)  # speeds are compared, and compiling is not one of them
    show("generating", 0, effort.sequences * length)
    generated = _generated(loaded, effort.sequences, length, bos, seed)
    show("generating", effort.sequences * length, effort.sequences * length)

    def scored(stage: str, pieces: Sequence[Sequence[int]]) -> dict[str, Outcome]:
        samples = [Sample(tuple(piece), prompt=prompt, score_from=1) for piece in pieces]
        return compare(loaded, settings, samples, bins=_PARTS, clock=clock, progress=_told(show, stage, samples))

    on_generated = scored("generated text", generated)
    on_text = scored("text", pieces) if pieces else {}
    probes: list[Sample] = []
    on_probes: dict[str, Outcome] = {}
    if tokenizer is not None and effort.probes:
        filler = text.ids if text is not None else [token for piece in generated for token in piece]
        size = min(effort.probe_tokens, loaded.config.max_model_len - 16)
        probes = passkeys(tokenizer, filler, size, effort.probes, random.Random(seed), bos)
        # Only the answer is judged, so the way there may go in larger steps.
        on_probes = compare(
            loaded,
            settings,
            probes,
            conditions=Conditions(chunk_tokens=256),
            bins=1,
            clock=clock,
            progress=_told(show, "retrieval probes", probes),
        )
    rows = {
        name: Row(
            values=dict(settings.get(name, {})),
            bits_per_element=bits_per_element(
                loaded.groups, FORMAT_BY_NAME[str(settings.get(name, {}).get("kv_format", NATIVE))]
            ),
            decode_tokens_per_s=outcome.decode_tokens_per_s,
            generated=_source(outcome.tally),
            text=_source(on_text[name].tally) if on_text else None,
            probes=_probes(on_probes[name].tally, len(probes)) if on_probes else None,
        )
        for name, outcome in on_generated.items()
    }
    device = loaded.model.device.type
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    return QualityTable(
        model=Model(name=loaded.name, sha256=model_digest(loaded.folder), dtype=dtype),
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine_info(device),
        conditions=_conditions(effort, length, prompt, text, len(pieces), seed),
        settings=rows,
    )


def _silent(_stage: str, _done: int, _total: int) -> None:
    """Nobody watches."""


def _told(show: Progress, stage: str, samples: Sequence[Sample]) -> Callable[[int], None]:
    """Progress of one comparison. The last token of a sample is predicted and never computed."""
    total = sum(max(sample.prompt, len(sample.ids) - 1) for sample in samples)
    done = 0

    def told(tokens: int) -> None:
        nonlocal done
        done += tokens
        show(stage, done, total)

    return told


def _generated(loaded: LoadedModel, count: int, length: int, bos: int | None, seed: int) -> list[list[int]]:
    """Token ids sampled at temperature 1; without a first token of its own, a model begins with random ones."""
    rng = random.Random(seed)
    starts = [[bos if bos is not None else rng.randrange(loaded.config.vocab_size)] for _ in range(count)]
    params = [
        SamplingParams(max_tokens=length - 1, temperature=1.0, seed=seed + number, ignore_eos=True)
        for number in range(count)
    ]
    shape_bytes = sum(group.shape.block_bytes(FORMAT_BY_NAME[NATIVE], 256) for group in loaded.groups)
    pool_bytes = _POOL_BYTES_PER_TOKEN_MARGIN * shape_bytes * (count * (length // 256 + 1) + 16)
    results = generate(loaded, starts, params, pool_bytes=pool_bytes, seed=seed)
    return [[*start, *result.output_ids] for start, result in zip(starts, results, strict=True)]


def _scores(figures: Figures) -> Scores:
    return Scores(**asdict(figures))


def _source(tally: Tally) -> Source:
    parts = [tally.figures(part, part + 1) for part in range(_PARTS)]
    after = tally.figures(_PROMPT_PARTS)
    if after is None:
        raise RuntimeError("nothing was judged after the prompts")
    return Source(after_prompt=_scores(after), by_position=[None if part is None else _scores(part) for part in parts])


def _probes(tally: Tally, count: int) -> Probes:
    answers = tally.figures()
    if answers is None:
        raise RuntimeError("no probe was judged")
    return Probes(n=count, accuracy=tally.share_right, answers=_scores(answers))


def _conditions(
    effort: Effort, length: int, prompt: int, text: Text | None, text_sequences: int, seed: int
) -> dict[str, Any]:
    return {
        **asdict(Conditions()),
        "tokens": length,
        "prompt_tokens": prompt,
        "generated_sequences": effort.sequences,
        "text": None if text is None else text.name,
        "text_sequences": text_sequences,
        "probe_tokens": effort.probe_tokens,
        "seed": seed,
    }
