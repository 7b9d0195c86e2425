"""The profile that comes with the bundled model is of that model, was measured, and knows what its formats cost."""

from __future__ import annotations

import json
from pathlib import Path

from engine.formats import FORMATS
from envs.profile import read_profile

REPOSITORY = Path(__file__).parents[2]


def test_it_is_the_bundled_models_and_measured() -> None:
    profile = read_profile(REPOSITORY / "envs/profiles/bundled_cpu.yaml")
    config = json.loads((REPOSITORY / "engine/bundled/model/config.json").read_text())
    (group,) = profile.groups()
    assert len(group.layers) == config["num_hidden_layers"]
    assert group.shape.num_kv_heads == config["num_key_value_heads"]
    assert profile.model.vocab_size == config["vocab_size"]
    assert not profile.is_estimated
    assert profile.quality is not None
    assert not profile.quality.estimated
    assert set(profile.quality.by_format) == {kind.name for kind in FORMATS}
    assert max(profile.quality.by_format.values()) < 0.005  # any format is inside the default budget
    assert min(profile.quality.evicted_by.values()) > 0.005  # and eviction for ever is not
