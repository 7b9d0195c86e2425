"""Scoring through the engine: right on native, nothing between native and itself, and formats under the conditions."""

from __future__ import annotations

import math
import random

import pytest
import torch

from engine.clock import RealClock
from engine.errors import EngineError
from engine.loader import LoadedModel
from engine.quality.compare import compare
from engine.quality.samples import Sample, windows
from engine.quality.scoring import Conditions, ScoringEngine
from engine.quality.settings import eviction_settings, format_settings
from engine.quality.tally import Figures, Tally
from kernels.layout import FORMAT_BY_NAME

LENGTH = 320


def texts(count: int, length: int = LENGTH) -> list[tuple[int, ...]]:
    rng = random.Random(1)
    return [tuple(rng.randrange(64) for _ in range(length)) for _ in range(count)]


def all_figures(tally: Tally, first: int = 0, stop: int | None = None) -> Figures:
    found = tally.figures(first, stop)
    assert found is not None
    return found


def test_native_perplexity_equals_transformers(loaded: LoadedModel) -> None:
    transformers = pytest.importorskip("transformers", reason="the oracle; install the dev extra")
    oracle = transformers.AutoModelForCausalLM.from_pretrained(loaded.folder, dtype=torch.float32).eval()
    pieces, judged_from = texts(3), 100
    with torch.no_grad():
        losses = [
            torch.nn.functional.cross_entropy(
                oracle(torch.tensor([piece])).logits[0, judged_from - 1 : -1], torch.tensor(piece[judged_from:])
            ).item()
            for piece in pieces
        ]
    whole = [Sample(piece, prompt=LENGTH, score_from=judged_from) for piece in pieces]
    forced = [Sample(piece, prompt=judged_from, score_from=judged_from) for piece in pieces]
    for samples in (whole, forced):
        found = all_figures(compare(loaded, {}, samples, conditions=Conditions(batch=2))["native"].tally)
        assert found.tokens == 3 * (LENGTH - judged_from)
        assert found.perplexity == pytest.approx(math.exp(sum(losses) / 3), rel=1e-5)


def test_native_against_itself_is_nothing_and_formats_cost_in_order(loaded: LoadedModel) -> None:
    samples = [Sample(piece, prompt=256, score_from=1) for piece in texts(4)]
    settings = {"again": {}, "large": {"block_size": 128}, **format_settings()}
    found = {name: outcome.tally for name, outcome in compare(loaded, settings, samples).items()}
    for name in ("native", "again", "large"):
        figures = all_figures(found[name])
        assert (figures.kl, figures.increase_pct, figures.top1) == (0.0, 0.0, 1.0)
    assert 0 < all_figures(found["int8"]).kl < all_figures(found["k8v4"]).kl < all_figures(found["int4"]).kl
    # Nothing is old enough to be recoded for the first quarter.
    assert all_figures(found["int4"], 0, 1).kl == 0.0
    assert all_figures(found["int4"], 3).kl > 0


def test_eviction_costs_only_after_the_prompt(loaded: LoadedModel) -> None:
    samples = [Sample(piece, prompt=240, score_from=1) for piece in texts(2)]
    settings = {"window 128": {"eviction": "window", "keep_tokens": 128}}
    tally = compare(loaded, settings, samples)["window 128"].tally
    assert all_figures(tally, 0, 3).kl == 0.0
    assert all_figures(tally, 3).kl > 0


def test_chunks_are_short_and_everything_old_is_recoded_before_the_next(loaded: LoadedModel) -> None:
    conditions = Conditions(chunk_tokens=32, recent_tokens=64, batch=4)
    samples = [Sample(piece, prompt=LENGTH, score_from=1) for piece in texts(2)]
    scoring = ScoringEngine(loaded, samples, {"kv_format": "int4"}, conditions, RealClock())
    cache, scheduler = scoring.engine.cache, scoring.engine.scheduler
    int4, steps = FORMAT_BY_NAME["int4"].code, 0
    while not scoring.is_done:
        before = {request: request.num_computed_tokens for request in scheduler.running}
        scoring.step()
        steps += 1
        for request in scheduler.running:
            assert request.num_computed_tokens - before.get(request, 0) <= 32
            limit = request.num_computed_tokens - 64
            for entry in cache.entries(request, 0):
                if entry.first + 32 <= limit:
                    assert entry.format_code == int4, f"native at {entry.first} of {request.num_computed_tokens}"
    assert steps == LENGTH // 32


def test_what_is_too_long_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(EngineError, match=r"600 tokens are to be scored; the model takes 512"):
        compare(loaded, {}, [Sample(texts(1, 600)[0], prompt=600, score_from=1)])
    with pytest.raises(ValueError, match="score_from"):
        Sample((1, 2, 3), prompt=3, score_from=3)


def test_tally_counts_what_a_hand_would() -> None:
    native = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.7, 0.1]]).log()
    other = torch.tensor([[0.25, 0.5, 0.25], [0.6, 0.3, 0.1]]).log()
    tally = Tally([4, 4], 2, torch.device("cpu"))
    tally.add(torch.tensor([0, 1]), torch.tensor([1, 3]), torch.tensor([1, 1]), native, other)
    first, second = all_figures(tally, 0, 1), all_figures(tally, 1)
    assert first.kl == pytest.approx(0.5 * math.log(2))
    assert first.perplexity == pytest.approx(2.0)
    assert first.increase_pct == pytest.approx(0.0)
    expected = 0.2 * math.log(0.2 / 0.6) + 0.7 * math.log(0.7 / 0.3)
    assert second.kl == pytest.approx(expected, rel=1e-5)
    assert second.increase_pct == pytest.approx(100 * (0.7 / 0.3 - 1))
    assert second.top1 == 0.0
    assert tally.right == [True, False]
    assert tally.share_right == 0.5
    both = all_figures(tally)
    mean = math.log(0.7 / 0.3) / 2
    assert both.increase_error_pct == pytest.approx(100 * math.exp(mean) * mean / math.sqrt(2))
    assert Tally([4], 2, torch.device("cpu")).figures() is None


def test_windows_do_not_overlap_and_begin_with_the_first_token() -> None:
    pieces = windows(range(100), 10, 20, bos=77)
    assert len(pieces) == 11
    assert all(piece[0] == 77 and len(piece) == 10 for piece in pieces)
    seen = [token for piece in pieces for token in piece[1:]]
    assert len(set(seen)) == len(seen)
    assert windows(range(5), 10, 3, None) == []


def test_evictions_that_a_prompt_cannot_show_are_left_out() -> None:
    names = eviction_settings(400)
    assert "window 256" in names
    assert "window 512" not in names
