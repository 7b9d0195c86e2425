"""Greedy output of the whole engine (scheduler, paged cache, kernels, model) against transformers', in float32.

Every token that the engine chose is checked against the oracle's logits after the same tokens, so one divergence does
not hide later ones. A different choice is allowed only where the oracle's two best logits are within 1e-4; those are
counted and must be at most 0.1 %. Log-probabilities of the chosen tokens must agree too: random models repeat
themselves, and a repeated token alone would prove little.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.loader import LoadedModel, load_model
from engine.memory_model import slab_bytes
from engine.models.random_model import write_random_model
from engine.offline import OfflineEngine, OfflineResult
from engine.plan import StepPlan
from engine.request import CachePolicy, Request, RequestStatus, SamplingParams
from kernels.layout import BLOCK_SIZES

transformers = pytest.importorskip("transformers", reason="transformers is the oracle; install the dev extra")

TIE_GAP = 1e-4
LOGPROB_ERROR = 3e-4
NEW_TOKENS = 20
BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
}
SLIDING = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
MODELS: dict[str, dict[str, Any]] = {
    "llama-grouped-untied": {"model_type": "llama"},
    "llama-multi-head-tied": {"model_type": "llama", "num_key_value_heads": 4, "tie_word_embeddings": True},
    "qwen2-grouped-tied-two-windows": {"model_type": "qwen2", **SLIDING, "tie_word_embeddings": True},
    "qwen2-multi-head-untied": {"model_type": "qwen2", "num_key_value_heads": 4},
    "qwen3-grouped-tied": {"model_type": "qwen3", "tie_word_embeddings": True},
    "qwen3-multi-head-untied": {"model_type": "qwen3", "num_key_value_heads": 4},
    "mistral-grouped-window": {"model_type": "mistral", "sliding_window": 24},
    "mistral-multi-head-window-tied": {
        "model_type": "mistral",
        "sliding_window": 40,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
}


@dataclass
class Oracle:
    """A model on both sides, and the oracle's verdicts, kept because most variants produce the same tokens."""

    loaded: LoadedModel
    reference: Any
    num_checked: int = 0
    num_ties: int = 0
    verdicts: dict[tuple[int, ...], tuple[int, list[float]]] = field(default_factory=dict)

    def check(self, result: OfflineResult) -> None:
        """Every output token is the oracle's argmax, or one of a near tie."""
        prompt, output = result.request.prompt_ids, result.output_ids
        assert len(output) == result.request.params.max_tokens
        key = (*prompt, *output)
        if key not in self.verdicts:
            self.verdicts[key] = self._compare(prompt, output)
        ties, logprobs = self.verdicts[key]
        self.num_checked += len(output)
        self.num_ties += ties
        assert [entry.logprob for entry in result.logprobs] == pytest.approx(logprobs, abs=LOGPROB_ERROR)

    def _compare(self, prompt: list[int], output: list[int]) -> tuple[int, list[float]]:
        with torch.inference_mode():
            logits = self.reference(torch.tensor([prompt + output[:-1]])).logits[0, len(prompt) - 1 :]
        top = logits.topk(2)
        ties = 0
        for step, token in enumerate(output):
            if token == int(top.indices[step, 0]):
                continue
            gap = float(top.values[step, 0] - logits[step, token])
            assert gap < TIE_GAP, f"step {step}: {token} is {gap} below {int(top.indices[step, 0])}"
            ties += 1
        chosen = torch.log_softmax(logits, -1).gather(1, torch.tensor(output)[:, None])[:, 0]
        return ties, chosen.tolist()


@pytest.fixture(scope="module")
def oracle_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Oracle]]:
    made: dict[str, Oracle] = {}

    def build(name: str) -> Oracle:
        if name not in made:
            family = MODELS[name]["model_type"].capitalize()
            raw = {**BASE, "architectures": [f"{family}ForCausalLM"], **MODELS[name]}
            folder: Path = tmp_path_factory.mktemp("oracle") / name
            write_random_model(folder, raw, seed=7, deviation=0.15)
            reference = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
            made[name] = Oracle(load_model(folder, dtype="float32"), reference)
        return made[name]

    yield build
    checked = sum(oracle.num_checked for oracle in made.values())
    ties = sum(oracle.num_ties for oracle in made.values())
    print(f"\noracle: {checked} tokens checked, {ties} near ties taken otherwise")
    assert ties <= checked / 1000


def prompts(lengths: tuple[int, ...], shared: int) -> list[list[int]]:
    """Random prompts; all but the last begin with the same ``shared`` tokens."""
    rng = random.Random(11)
    head = [rng.randrange(128) for _ in range(shared)]
    made = [(head + [rng.randrange(128) for _ in range(length)])[:length] for length in lengths[:-1]]
    return [*made, [rng.randrange(128) for _ in range(lengths[-1])]]


def make_room_scarce(engine: OfflineEngine) -> None:
    """Let every tenth allocation of a running request find no room: the scheduler then preempts, as in a full pool."""
    allocate, calls = engine.cache.allocate, 0

    def scarce(request: Request, num_new_tokens: int, **options: bool) -> bool:
        nonlocal calls
        calls += request.status is RequestStatus.RUNNING and len(engine.scheduler.running) > 1
        if calls == 10:
            calls = 0
            return False
        return allocate(request, num_new_tokens, **options)

    engine.cache.allocate = scarce  # type: ignore[method-assign]
    engine.cache.take_slot = lambda _: False  # type: ignore[method-assign]  # so that everything asks above


def run_variant(oracle: Oracle, *, chunk: int, block_size: int, prefix: bool, preempt: bool) -> None:
    """A mixed batch with staggered arrivals; asserts that the variant is what its name says, then its output."""
    loaded = oracle.loaded
    slab = sum(slab_bytes(group.shape, 256) for group in loaded.groups)
    engine = OfflineEngine(loaded, pool_bytes=24 * slab, values={"block_size": block_size}, recent_tokens=32)
    params, policy = SamplingParams(max_tokens=NEW_TOKENS, logprobs=0), CachePolicy(use_prefix_cache=prefix)
    texts = prompts((70, 3, 33, 64, 17, 90), 48)
    if prefix:
        engine.add(texts[0], params, policy=policy)
        engine.run()
    if preempt:
        make_room_scarce(engine)
    results = [engine.add(text, params, policy=policy) for text in texts[:3]]
    late = texts[3:]
    batches = []

    def between_steps(plan: StepPlan | None) -> None:
        if plan is not None:
            batches.append([sequence.num_tokens for sequence in plan.sequences])
            if late:
                results.append(engine.add(late.pop(), params, policy=policy))
        decoding = sum(request.num_tokens - request.num_computed_tokens == 1 for request in engine.scheduler.running)
        engine.scheduler._planner.max_batched = decoding + chunk  # so that prefill gets chunks of just this size

    between_steps(None)
    engine.run(between_steps)
    assert max(map(len, batches)) >= 2
    assert preempt or max(map(max, batches)) == min(chunk, 90)  # a preempted decode leaves its token to a prefill
    assert len(results) == len(texts)
    assert prefix == any(result.request.num_cached_tokens > 0 for result in results)
    assert preempt == any(result.request.num_preemptions > 0 for result in results)
    for result in results:
        oracle.check(result)
    engine.cache.check_integrity()


CHUNKS = (1, 7, 32, 512)
GRID = list(product(MODELS, CHUNKS, BLOCK_SIZES, (False, True), (False, True)))
# A sample that holds every value of every factor, and every pair of chunk and block size once.
PAIRS = list(product(CHUNKS, BLOCK_SIZES))
SUBSET = [
    (name, *PAIRS[(index * 7 + 3) % len(PAIRS)], bool((index + index // 8) % 2), bool((index // 2 + index // 8) % 2))
    for index, name in enumerate(list(MODELS) * 3)
][: len(PAIRS)]


@pytest.mark.parametrize(("model", "chunk", "block_size", "prefix", "preempt"), SUBSET)
def test_greedy_equals_transformers(
    oracle_of: Callable[[str], Oracle], model: str, chunk: int, block_size: int, prefix: bool, preempt: bool
) -> None:
    run_variant(oracle_of(model), chunk=chunk, block_size=block_size, prefix=prefix, preempt=preempt)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "chunk", "block_size", "prefix", "preempt"), GRID)
def test_greedy_equals_transformers_everywhere(
    oracle_of: Callable[[str], Oracle], model: str, chunk: int, block_size: int, prefix: bool, preempt: bool
) -> None:
    run_variant(oracle_of(model), chunk=chunk, block_size=block_size, prefix=prefix, preempt=preempt)
