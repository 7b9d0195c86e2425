"""Distributions, penalties, log-probabilities and reproducibility of sampling."""

from __future__ import annotations

import math
import random
from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from engine import sampling
from engine.request import Request, SamplingParams
from engine.sampling import Sampler, token_logprobs, uniform


def request(prompt: list[int] | None = None, output: list[int] | None = None, **params: object) -> Request:
    made = Request("r", prompt or [0], SamplingParams(max_tokens=10, **params), arrival_ns=0)  # type: ignore[arg-type]
    made.output_ids = output or []
    return made


def sampler(seed: int = 0) -> Sampler:
    return Sampler(random.Random(seed))


def draw_many(logits: Tensor, count: int, **params: object) -> Counter[int]:
    """``count`` consecutive draws of one request."""
    one, chooser, seen = request(**params), sampler(), Counter[int]()
    for _ in range(count):
        (token,) = chooser.sample(logits[None], [one])
        one.output_ids.append(token)
        seen[token] += 1
    return seen


def test_uniform_draws_are_uniform_and_independent() -> None:
    draws = [uniform(seed, index) for seed in range(20) for index in range(500)]
    assert all(0 <= draw < 1 for draw in draws)
    buckets = Counter(int(draw * 10) for draw in draws)
    assert all(abs(buckets[bucket] - 1000) < 4 * math.sqrt(900) for bucket in range(10))
    by_seed = [uniform(seed, 0) for seed in range(2000)]
    mean = sum(by_seed) / 2000
    lag = sum((a - mean) * (b - mean) for a, b in pairwise(by_seed)) / 2000
    assert abs(mean - 0.5) < 0.03
    assert abs(lag) < 0.01
    assert uniform(-1 & (1 << 64) - 1, 3) != uniform(0, 3)


def test_greedy_takes_the_first_maximum_and_keeps_logits() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [9.0, 1.0, 1.0]])
    before = logits.clone()
    assert sampler().sample(logits, [request(), request()]) == [1, 0]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_sampled_frequencies_follow_the_softmax(temperature: float) -> None:
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0, -torch.inf])
    count = 4000
    seen = draw_many(logits, count, temperature=temperature, seed=11)
    expected = torch.softmax(logits / temperature, 0).tolist()
    for token, probability in enumerate(expected):
        assert abs(seen[token] - count * probability) <= 4 * math.sqrt(count * probability * (1 - probability)) + 1e-9


def test_top_k_and_top_p_cut_the_tail() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draw_many(logits, 300, temperature=1.0, top_k=2, seed=1)) == {0, 1}
    assert set(draw_many(logits, 300, temperature=1.0, top_p=0.65, seed=1)) == {0, 1}
    assert set(draw_many(logits, 300, temperature=1.0, top_p=0.75, seed=1)) == {0, 1, 2}
    assert set(draw_many(logits, 100, temperature=1.0, top_p=1e-9, seed=1)) == {0}
    # top-p counts what top-k left: 0.4 / 0.7 already reaches 0.5
    assert set(draw_many(logits, 100, temperature=1.0, top_k=2, top_p=0.5, seed=1)) == {0}
    assert set(draw_many(logits, 600, temperature=1.0, top_k=99, seed=1)) == {0, 1, 2, 3}
    seen = draw_many(logits, 4000, temperature=1.0, top_k=2, seed=2)
    assert abs(seen[0] - 4000 * 4 / 7) < 4 * math.sqrt(4000 * 4 / 7 * 3 / 7)


def test_large_vocabularies_take_the_short_way_and_agree_with_the_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 3000, generator=generator) * torch.tensor([[0.1], [1.0], [3.0], [6.0], [3.0], [1.0]])
    params = [
        {"top_p": 0.9},  # nearly flat: needs more than the candidates
        {"top_p": 0.5},
        {"top_p": 0.9},
        {"top_p": 0.9, "top_k": 5},
        {"top_k": 2000},
        {"top_k": 1, "top_p": 0.1},
    ]
    requests = [request(temperature=1.0, seed=i, **one) for i, one in enumerate(params)]
    for rows in ([0, 1, 2, 3, 4, 5], [1, 2, 3], [3, 5], [4]):
        chosen = [requests[row] for row in rows]
        short = [sampler().sample(logits[rows], chosen) for _ in range(2)]
        with monkeypatch.context() as patched:
            patched.setattr(sampling, "_TOP_CANDIDATES", 1 << 30)
            long = sampler().sample(logits[rows], chosen)
        assert short[0] == short[1] == long


def test_tiny_temperature_is_the_maximum_without_overflow() -> None:
    logits = torch.tensor([1e4, 1e4 - 1, -1e4])
    assert set(draw_many(logits, 50, temperature=1e-6)) == {0}


def test_a_seed_decides_whatever_the_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(5, 50, generator=generator)
    alone = [
        sampler(seed).sample(logits[row : row + 1], [request(temperature=1.0, seed=row)])[0]
        for row, seed in enumerate((5, 6, 7, 8, 9))
    ]
    mixed = [request(temperature=1.0, seed=row) for row in range(5)]
    assert sampler(1).sample(logits, mixed) == alone
    shuffled = [3, 1, 4, 0, 2]
    assert sampler(2).sample(logits[shuffled], [mixed[row] for row in shuffled]) == [alone[row] for row in shuffled]
    greedy = request()
    got = sampler(3).sample(logits[[0, 0, 1]], [mixed[0], greedy, mixed[1]])
    assert got == [alone[0], int(logits[0].argmax()), alone[1]]


def test_without_a_seed_requests_differ_and_the_injected_rng_decides() -> None:
    logits = torch.zeros(1, 10_000)
    first, second = request(temperature=1.0), request(temperature=1.0)
    chooser = sampler(4)
    tokens = [chooser.sample(logits, [first])[0], chooser.sample(logits, [second])[0]]
    assert tokens[0] != tokens[1]
    again = sampler(4)
    assert [again.sample(logits, [request(temperature=1.0)])[0] for _ in range(2)] == tokens


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5]])

    def penalised(one: Request) -> Tensor:
        row = logits[0].clone()
        sampler()._penalise(row, one)
        return row

    one = request([0, 1], [2, 2, 3], repetition_penalty=2.0)
    assert torch.equal(penalised(one), torch.tensor([1.0, -4.0, 0.5, 0.25]))  # prompt and output, each once
    one = request([0, 1], [2, 2, 3], frequency_penalty=0.5)
    assert torch.equal(penalised(one), torch.tensor([2.0, -2.0, 0.0, 0.0]))  # output alone, per occurrence
    one = request([0, 1], [2, 2, 3], presence_penalty=0.5)
    assert torch.equal(penalised(one), torch.tensor([2.0, -2.0, 0.5, 0.0]))


def test_penalty_counts_grow_with_the_output() -> None:
    chooser, one = sampler(), request([3], [], frequency_penalty=2.0)
    logits = torch.tensor([[1.5, 1.0, 0.5, 0.0]])
    taken = []
    for _ in range(5):
        (token,) = chooser.sample(logits, [one])
        one.output_ids.append(token)
        taken.append(token)
    assert taken == [0, 1, 2, 3, 0]


def test_logprobs_ranks_and_top() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 2.0], [1.0, 1.0, 0.0, 0.0]])
    expected = torch.log_softmax(logits, -1)
    first, second = token_logprobs(logits, [3, 1], [2, 0])
    assert (first.token_id, first.rank) == (3, 2)
    assert first.logprob == pytest.approx(float(expected[0, 3]))
    assert [token for token, _ in first.top] == [1, 3]
    assert first.top[1][1] == first.logprob
    assert (second.rank, second.top) == (1, ())  # ties share the better rank


def test_logprobs_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 16, generator=torch.Generator().manual_seed(0))
    tokens, num_top = list(range(7)), [1, 2, 3, 0, 1, 99, 2]
    whole = token_logprobs(logits, tokens, num_top)
    monkeypatch.setattr(sampling, "_LOGPROB_ELEMENTS", 32)
    assert token_logprobs(logits, tokens, num_top) == whole
    assert len(whole[5].top) == 16


@pytest.mark.parametrize("params", [{}, {"top_p": 0.5}, {"top_k": 2}])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_no_numbers_does_not_take_the_others_with_it(params: dict[str, float], value: float) -> None:
    logits = torch.tensor([[0.0, 50.0, 0.0], [value] * 3])
    first, second = sampler().sample(logits, [request(temperature=1.0, **params), request(temperature=1.0, **params)])
    assert first == 1
    assert second in range(3)


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-40, 1e-46, 5e-324])
def test_the_coldest_temperatures_take_the_maximum(temperature: float) -> None:
    assert draw_many(torch.tensor([0.0, 2.0, 1.0]), 20, temperature=temperature) == {1: 20}
