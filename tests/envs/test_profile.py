"""The profile document, the analytic estimate, and the fit to a server's metrics."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from autotune import profiling
from engine.cache_manager import CacheManager
from engine.clock import ManualClock
from engine.core_stats import Distributions
from engine.errors import EngineError
from engine.events import NullSink
from engine.memory_model import GroupSpec
from engine.metrics import EngineMetrics
from engine.models.registry import parse_config
from engine.request import Request, SamplingParams
from engine.stats import Counters, EngineStats
from engine.step_counts import ALL_TERMS, STEP_NAMES
from engine.tunables import default_values
from envs.analytic import DEVICES, analytic_profile, parameters
from envs.measured import measure_profile
from envs.metrics_fit import Window, fit_windows, read_page, window
from envs.profile import Profile, ProfileError, Quality, capacities, read_profile, terms, write_profile
from kernels.layout import KVShape

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 131072, "hidden_act": "silu", "torch_dtype": "bfloat16",
}  # fmt: skip


def estimated(device: str = "H200", **changes: Any) -> Profile:
    config = parse_config({**CONFIG, **changes})
    return analytic_profile(config, "llama", device, created="2026-11-30T00:00:00Z", versions={"numpy": "2"})


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = estimated().model_copy(
        update={"quality": Quality(by_format={"native": 0, "int8": 0.001, "k8v4": 0.01, "int4": 0.02})}
    )
    write_profile(profile, tmp_path / "p.yaml")
    again = read_profile(tmp_path / "p.yaml")
    assert again == profile
    assert again.digest == profile.digest
    assert again.latency_model() == profile.latency_model()
    assert again.groups() == profile.groups()


def test_an_edited_file_is_refused_until_its_digest_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml"
    write_profile(estimated(), path)
    text = path.read_text().replace("pool_bytes:", "pool_bytes: 123456789 #", 1)
    path.write_text(text)
    with pytest.raises(ProfileError, match="changed after it was written"):
        read_profile(path)
    path.write_text("".join(line for line in text.splitlines(keepends=True) if not line.startswith("digest:")))
    assert read_profile(path).pool_bytes == 123456789


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "shopping list"}, "kind"),
        ({"version": 2}, "version"),
        ({"surprise": 1}, "surprise"),
        ({"pool_bytes": -1}, "pool_bytes"),
        ({"latency": {"knee_tokens": 1, "terms": {"warp": {"seconds": 1.0, "unit": "x"}}}}, "warp"),
        ({"latency": {"knee_tokens": 1, "terms": {"step": {"seconds": -1.0, "unit": "x"}}}}, "step"),
    ],
)
def test_what_is_no_profile_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_text(yaml.safe_dump({**estimated().model_dump(mode="json"), **change}))
    with pytest.raises(ProfileError, match=message) as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (("model", "max_model_len"), 0, "max_model_len"),
        (("model", "vocab_size"), -1, "vocab_size"),
        (("model", "groups"), [], "groups"),
        (("model", "groups", 0, "head_dim"), 0, "head_dim"),
        (("model", "groups", 0, "layers"), [], "layers"),
        (("model", "groups", 0, "window"), -1, "window"),
        (("device", "bandwidth_bytes_per_s"), 0.0, "bandwidth_bytes_per_s"),
        (("quality", "by_format"), {}, "every format"),
        (("quality", "by_format", "int4"), 1e308, "int4"),
    ],
)
def test_a_figure_that_no_engine_has_is_refused_where_it_is_read(
    tmp_path: Path, place: tuple[Any, ...], value: Any, message: str
) -> None:
    path, document = tmp_path / "p.yaml", estimated().model_dump(mode="json")
    *way, last = place
    inner = document
    for key in way:
        inner = inner[key]
    inner[last] = value
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(ProfileError, match=message) as caught:
        read_profile(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    ["", "[1, 2]", "{a: ", "\udcff", "[" * 10_000, "a: 2026-13-01", "a: !!timestamp x"],
    ids=lambda text: text[:9],
)
def test_rubbish_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "p.yaml"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(ProfileError, match="cannot be read"):
        read_profile(tmp_path / "absent.yaml")


def test_every_term_is_priced_and_named_with_its_unit() -> None:
    assert set(terms({})) == {term.name for term in ALL_TERMS}
    assert all(terms({})[term.name].unit == term.unit for term in ALL_TERMS)


# -- analytic -------------------------------------------------------------------------------------------------------


def test_weights_of_a_known_model_are_counted() -> None:
    layers, head = parameters(parse_config(CONFIG))
    assert layers + 2 * head == pytest.approx(8.03e9, rel=2e-3)  # Llama 3 8B: 8.03 G with embeddings


@pytest.mark.parametrize("device", DEVICES)
def test_an_estimate_says_so_everywhere(device: str) -> None:
    profile = estimated(device)
    assert profile.is_estimated
    assert "ESTIMATED" in profile.describe()
    assert any("nothing was measured" in note for note in profile.notes)
    assert set(profile.estimated_terms) == set(profile.latency.terms)


def test_an_estimate_respects_what_the_device_can_do() -> None:
    """Decoding reads all weights once, a prompt takes two operations per weight: no faster, nor three times slower."""
    profile = estimated()
    model, sheet = profile.latency_model(), DEVICES["H200"]
    layers, head = parameters(parse_config(CONFIG))
    counts = dict.fromkeys(STEP_NAMES, 0) | {"step": 1, "decode_sequence": 8, "sample": 8}
    counts["decode_kv_native"] = 8 * 1000 * 32
    bound_ns = 1e9 * (2 * (layers + head) + 8 * 1000 * 32 * 4096) / sheet.memory_bytes_per_s
    assert bound_ns < model.step_ns(list(counts.values())) < 3 * bound_ns
    prompt = dict.fromkeys(STEP_NAMES, 0) | {"step": 1, "prefill_sequence": 1, "prefill_token": 2048}
    prompt |= {"prefill_pair": 32 * 2048 * 1024, "token_beyond_knee": 2048 - profile.latency.knee_tokens}
    bound_ns = 1e9 * 2 * layers * 2048 / sheet.flops
    assert bound_ns < model.step_ns(list(prompt.values())) < 3 * bound_ns


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="weights"):
        estimated("L4", num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, num_attention_heads=64)
    with pytest.raises(ValueError, match="choose one of H200"):
        estimated("Z80")


# -- capacity -------------------------------------------------------------------------------------------------------


def test_a_pool_with_room_for_no_conversion_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.loader import load_model
    from engine.models.random_model import write_random_model
    from engine.profiling.measure import Measurer, Samples

    raw = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
    }  # fmt: skip
    loaded = load_model(write_random_model(tmp_path / "model", raw, seed=1))
    monkeypatch.setattr(Measurer, "warm_up", lambda _measurer: None)
    monkeypatch.setattr(Measurer, "run", lambda *_: Samples([[1] * len(STEP_NAMES)], [1.0], [1]))
    with pytest.raises(EngineError, match="too small to convert anything; give more with --kv-pool-bytes"):
        measure_profile(loaded, pool_bytes=1 << 20, created="", versions={})


def test_native_capacity_is_exactly_what_the_cache_hands_out() -> None:
    groups = [GroupSpec("a", (0, 1), KVShape(2, 2, 16, 2)), GroupSpec("b", (2,), KVShape(1, 2, 16, 2))]
    pool_bytes = 300_000
    rows = {(row.kv_format, row.block_size): row for row in capacities(groups, pool_bytes)}
    for block_size in (16, 64, 256):
        values = {**default_values(), "block_size": block_size}
        cache = CacheManager(
            groups, pool_bytes, values, recent_tokens=0, sinks=0, watermark=0.0, clock=ManualClock(), events=NullSink()
        )
        blocks = 0
        while cache.allocate(Request(f"r{blocks}", [1], SamplingParams(1), 0), 1):
            blocks += 1
        assert rows["native", block_size].blocks == blocks
        assert rows["native", block_size].tokens == blocks * block_size == cache.max_sequence_tokens()
    assert ("int8", 16) not in rows
    assert len(rows) == 17


# -- metrics --------------------------------------------------------------------------------------------------------


def test_the_fit_finds_a_server_behind_its_windows() -> None:
    rng = random.Random(4)
    windows = []
    for _ in range(30):
        sequences, prefill, kv = rng.uniform(1, 40), rng.uniform(0, 200), rng.uniform(1e6, 1e9)
        windows.append(Window(sequences, prefill, kv, 2e-3 + 5e-5 * sequences + 1e-5 * prefill + 1e-12 * kv))
    fit = fit_windows(windows, 1000.0, "here")
    assert fit.seconds["step"] == pytest.approx(2e-3)
    assert fit.seconds["decode_sequence"] == pytest.approx(5e-5)
    assert fit.seconds["prefill_token"] == pytest.approx(1e-5)
    assert fit.seconds["decode_kv_native"] == pytest.approx(1e-9)
    assert fit.median_error < 1e-9


def test_what_never_varied_is_left_as_it_was() -> None:
    windows = [Window(8.0 + 0.1 * i, 0.0, None, 3e-3) for i in range(10)]
    assert set(fit_windows(windows, 1.0, "here").seconds) == {"step"}


def _windows(number: int, *, noise: float = 0.0, kv_per_sequence: float | None = None) -> list[Window]:
    rng = random.Random(7)
    windows = []
    for _ in range(number):
        sequences, prefill = rng.uniform(1, 40), rng.uniform(0, 200)
        kv = (
            rng.uniform(1e6, 1e9)
            if kv_per_sequence is None
            else kv_per_sequence * sequences * rng.uniform(0.999, 1.001)
        )
        step_s = 2e-3 + 5e-5 * sequences + 1e-5 * prefill + 1e-12 * kv
        windows.append(Window(sequences, prefill, kv, step_s * (1 + rng.gauss(0, noise))))
    return windows


def test_what_rises_and_falls_together_is_not_told_apart() -> None:
    """Every sequence has as much KV as every other: one price for both, whatever the noise would make of it."""
    fit = fit_windows(_windows(30, noise=0.03, kv_per_sequence=2e7), 1000.0, "here")
    both = {"decode_sequence", "decode_kv_native"}
    assert len(both & set(fit.untold)) == 1
    assert set(fit.untold.values()) <= {"not to be told from the others", "came out as nothing"}
    assert fit.seconds["step"] == pytest.approx(2e-3, rel=0.15)
    assert fit.seconds["prefill_token"] == pytest.approx(1e-5, rel=0.25)
    assert 0.005 < fit.median_error < 0.1
    assert fit.median_error <= fit.p90_error


def test_what_is_not_told_keeps_its_price_and_is_paid_for_once() -> None:
    steady = [replace(w, prefill_tokens=100.0, step_s=2e-3 + 5e-5 * w.decode_sequences + 1e-3, kv_bytes=None)
              for w in _windows(30)]  # fmt: skip
    fit = fit_windows(steady, 1000.0, "here", {"prefill_token": 1e-5})
    assert fit.untold == {"prefill_token": "hardly varied", "decode_kv_native": "not on the page"}
    assert fit.seconds == {"step": pytest.approx(2e-3), "decode_sequence": pytest.approx(5e-5)}
    dear = fit_windows(steady, 1000.0, "here", {"prefill_token": 1.0})
    assert all(value >= 0 for value in dear.seconds.values())


def test_errors_are_of_windows_that_were_left_out() -> None:
    wild = [replace(w, step_s=w.step_s * factor) for w, factor in zip(_windows(30), [0.4, 1.0, 2.5] * 10, strict=True)]
    assert fit_windows(wild, 1000.0, "here").median_error > 0.3


def test_too_few_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="too few"):
        fit_windows([Window(1, 1, 1, 1e-3)] * 3, 1.0, "here")


def test_our_own_page_is_read() -> None:
    from prometheus_client import CollectorRegistry

    metrics = EngineMetrics(CollectorRegistry())
    stats = EngineStats("i", "m", 1, 4096, 64, 0, default_values())
    stats.counters = Counters(steps=10, step_time_ns=10**8, decode_tokens_computed=40, kv_bytes_read=1000)
    metrics.update(stats, Distributions())
    before = read_page(metrics.page().decode())
    stats.counters = replace(
        stats.counters, steps=20, step_time_ns=3 * 10**8, decode_tokens_computed=100, kv_bytes_read=6000
    )
    stats.counters.prefill_tokens_computed = 30
    metrics.update(stats, Distributions())
    assert window(before, read_page(metrics.page().decode())) == Window(6.0, 3.0, 500.0, pytest.approx(0.02))
    assert window(before, before) is None


def vllm_page(gaps: int, seconds: float, prompts: int, steps: int, old: bool) -> str:
    name = "time_per_output_token_seconds" if old else "inter_token_latency_seconds"
    return "\n".join([
        "# TYPE vllm:num_requests_running gauge", 'vllm:num_requests_running{engine="0",model_name="m"} 4.0',
        "# TYPE vllm:prompt_tokens_total counter", f'vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompts}',
        f"# TYPE vllm:{name} histogram", f'vllm:{name}_bucket{{engine="0",le="+Inf",model_name="m"}} {gaps}',
        f'vllm:{name}_count{{engine="0",model_name="m"}} {gaps}',
        f'vllm:{name}_sum{{engine="0",model_name="m"}} {seconds}',
        "# TYPE vllm:iteration_tokens_total histogram",
        f'vllm:iteration_tokens_total_bucket{{engine="0",le="+Inf",model_name="m"}} {steps}',
        f'vllm:iteration_tokens_total_count{{engine="0",model_name="m"}} {steps}',
        f'vllm:iteration_tokens_total_sum{{engine="0",model_name="m"}} {gaps}', "",
    ])  # fmt: skip


@pytest.mark.parametrize("old", [False, True])
def test_vllms_page_is_read_under_either_name(old: bool) -> None:
    before, after = read_page(vllm_page(0, 0.0, 0, 0, old)), read_page(vllm_page(400, 2.0, 900, 100, old))
    assert window(before, after) == Window(4.0, 9.0, None, pytest.approx(0.005))


def test_another_servers_page_is_refused() -> None:
    with pytest.raises(ValueError, match="neither"):
        window({}, {"llamacpp:prompt_tokens_total": 1.0})


def test_a_profile_charges_every_way_of_evicting() -> None:
    profile = estimated()
    assert profile.quality is not None
    assert profile.quality.estimated
    table = profile.quality_table()
    assert table is not None
    assert table.loss_evicted("heavy_hitter") < table.loss_evicted("window")
    measured = profile.model_copy(
        update={"quality": Quality(by_format=profile.quality.by_format, evicted_by={"heavy_hitter": 0.01})}
    ).quality_table()
    assert measured is not None
    assert measured.loss_evicted("heavy_hitter") == 0.01
    assert measured.loss_evicted("window") == table.loss_evicted("window")


def test_what_evictions_cost_is_read_from_a_quality_table() -> None:
    """Keeping 512 of 2,048 costs 3 %: all of it 4 %; the dearest row of a way counts, and rows of two knobs only."""

    def row(increase_pct: float, **values: Any) -> Any:
        return SimpleNamespace(values=values, judged=SimpleNamespace(increase_pct=increase_pct))

    rows = {
        "a": row(3.0, eviction="window", keep_tokens=512),
        "b": row(1.0, eviction="window", keep_tokens=1024),
        "c": row(-0.2, eviction="heavy_hitter", keep_tokens=512),
        "d": row(9.0, kv_format="int4"),
    }
    table: Any = SimpleNamespace(conditions={"prompt_tokens": 2048}, settings=rows)
    assert profiling._evictions(table) == pytest.approx({"window": 0.04, "heavy_hitter": 0.0})


def test_profiles_say_what_the_link_to_the_host_is_worth() -> None:
    for device in ("H200", "L4"):
        profile = estimated(device)
        assert profile.offload is not None
        assert profile.offload.crossover_tokens is not None
        link = profile.host_link()
        assert link is not None
        assert link.in_bytes_per_s == profile.offload.bytes_per_s
    assert estimated().model_copy(update={"offload": None}).host_link() is None
