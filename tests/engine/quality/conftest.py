"""Tiny random models, and quality tables that cost no measuring."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.loader import LoadedModel, load_model
from engine.models.random_model import write_random_model
from engine.quality.table import Model, Probes, QualityTable, Row, Scores, Source

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="session")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("quality") / "model"
    return load_model(write_random_model(folder, CONFIG, seed=4, deviation=0.3), dtype="float32")


@pytest.fixture
def make_table() -> Callable[..., QualityTable]:
    def make(sha256: str = "0" * 64, **increase_pct: float) -> QualityTable:
        """A table with the given formats at the given increases of perplexity."""

        def row(name: str, increase: float) -> Row:
            scores = Scores(tokens=10, perplexity=5, increase_pct=increase, increase_error_pct=0, kl=0.01, top1=0.95)
            source = Source(after_prompt=scores, by_position=[scores, None])
            return Row(
                values={} if name == "native" else {"kv_format": name},
                bits_per_element=8.0,
                decode_tokens_per_s=None,
                generated=source,
                text=None,
                probes=Probes(n=50, accuracy=0.98, answers=scores),
            )

        rows = {name: row(name, increase) for name, increase in {"native": 0.0, **increase_pct}.items()}
        model = Model(name="tiny", sha256=sha256, dtype="float32")
        conditions = {"text": None, "tokens": 20, "prompt_tokens": 10, "chunk_tokens": 32, "recent_tokens": 64}
        return QualityTable(model=model, created="now", machine={"device": "cpu"}, conditions=conditions, settings=rows)

    return make


@pytest.fixture
def other_model(tmp_path: Path) -> Path:
    return write_random_model(tmp_path / "other", CONFIG, seed=5)
