"""``autotune plan``: to the byte what the engine allocates, and within 1 % of what is published of public models."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import engine

MODEL = Path(engine.__file__).parent / "bundled" / "model"
PROFILE = MODEL.parents[2] / "envs" / "profiles" / "bundled_cpu.yaml"

_7B = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "torch_dtype": "bfloat16"}
# Shapes as in the models' own config.json. KV bytes per token in 16 bits, parameters and bytes of the weights as
# published: docs/planning.md says where.
PUBLISHED: dict[str, tuple[dict[str, Any], float, int, int]] = {
    "Llama-3-8B": (
        _7B
        | {"architectures": ["LlamaForCausalLM"], "intermediate_size": 14336, "num_key_value_heads": 8}
        | {"vocab_size": 128256, "max_position_embeddings": 8192, "rope_theta": 500000.0},
        131_072,
        8_030_261_248,
        16_060_522_496,
    ),
    "Llama-2-7B": (
        _7B
        | {"architectures": ["LlamaForCausalLM"], "intermediate_size": 11008, "num_key_value_heads": 32}
        | {"vocab_size": 32000, "max_position_embeddings": 4096, "torch_dtype": "float16"},
        524_288,
        6_738_415_616,
        13_476_831_232,
    ),
    "Mistral-7B-v0.1": (
        _7B
        | {"architectures": ["MistralForCausalLM"], "intermediate_size": 14336, "num_key_value_heads": 8}
        | {"vocab_size": 32000, "max_position_embeddings": 32768, "sliding_window": 4096},
        131_072,
        7_241_732_096,
        14_483_464_192,
    ),
    "Qwen2.5-7B": (
        {"architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "intermediate_size": 18944}
        | {"num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}
        | {"max_position_embeddings": 131072, "torch_dtype": "bfloat16", "use_sliding_window": False},
        57_344,
        7_615_616_512,
        15_231_233_024,
    ),
}


def config_of(name: str, folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(PUBLISHED[name][0]))
    return str(path)


def planned(autotune: Any, *arguments: str) -> dict[str, Any]:
    _, out, err = autotune("plan", *arguments, "--json")
    assert err == ""
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_within_one_per_cent(autotune: Any, tmp_path: Path, name: str) -> None:
    _, kv_bytes, parameters, weight_bytes = PUBLISHED[name]
    model = planned(autotune, config_of(name, tmp_path), "--gpu", "H100")["model"]
    assert model["kv_bytes_per_token"]["native"] == pytest.approx(kv_bytes, rel=0.01)
    assert model["parameters"] == pytest.approx(parameters, rel=0.01)
    assert model["weight_bytes"] == pytest.approx(weight_bytes, rel=0.01)


def test_a_context_of_a_published_size(autotune: Any, tmp_path: Path) -> None:
    """llama.cpp allocates 256 MiB for 2,048 tokens of Llama 3 8B in 16 bits."""
    plan = planned(autotune, config_of("Llama-3-8B", tmp_path), "--gpu", "H100", "--context", "2048")
    assert plan["formats"][0]["session_bytes"] == 256 << 20


def test_protected_layers_take_as_much_in_every_format(autotune: Any) -> None:
    plain = planned(autotune, str(MODEL))["model"]["kv_bytes_per_token"]
    layers = json.loads((MODEL / "config.json").read_text())["num_hidden_layers"]
    kept = planned(autotune, str(MODEL), "--protect-layers", "1")["model"]["kv_bytes_per_token"]
    assert kept["native"] == plain["native"]
    assert kept["int4"] == pytest.approx((plain["native"] + (layers - 1) * plain["int4"]) / layers)


@pytest.mark.parametrize("host", [0, 32 << 20])
def test_to_the_byte_what_the_engine_allocates(autotune: Any, host: int) -> None:
    pytest.importorskip("torch")
    from engine.loader import load_model
    from engine.model_runner import ModelRunner
    from kernels import ops

    pool = 40 << 20
    arguments = [str(MODEL), "--gpu", "24G", "--kv-pool-bytes", str(pool), "--context", "2048"]
    plan = planned(autotune, *arguments, *(["--host-pool-bytes", str(host)] if host else []))
    loaded = load_model(MODEL, "cpu")
    weights = loaded.model.weights
    tensors = [weights.embedding, weights.final_norm, weights.head]
    tensors += [tensor for layer in weights.layers for tensor in vars(layer).values() if tensor is not None]
    assert plan["memory"]["weights"] == sum(tensor.nbytes for tensor in tensors)

    cache = real_cache(loaded.groups, pool, host, plan["memory"]["staging"])
    sizes = [cache.group_arena_bytes(group) for group in range(len(loaded.groups))]
    runner = ModelRunner(loaded, sizes, ops, rng=random.Random(0))
    assert plan["pool"]["arena_bytes"] == [arena.nbytes for arena in runner.arenas] == sizes
    groups = range(len(loaded.groups))
    assert plan["pool"]["host_arena_bytes"] == ([cache.group_host_bytes(group) for group in groups] if host else [])
    assert plan["pool"]["num_slabs"] == cache.layout.num_slabs
    assert plan["memory"]["staging"] == (pool // 16 if host else 0)


def real_cache(groups: Any, pool: int, host: int, staging: int) -> Any:
    from engine.cache_manager import CacheManager
    from engine.clock import ManualClock
    from engine.events import NullSink
    from engine.transfers import HostLink
    from engine.tunables import default_values

    return CacheManager(
        groups,
        pool - staging,
        default_values(),
        recent_tokens=64,
        sinks=16,
        watermark=0.01,
        clock=ManualClock(),
        events=NullSink(),
        host_pool_bytes=host,
        link=HostLink(1e9, 1e9) if host else None,
        staging_bytes=staging,
    )


def test_what_fits_and_what_would(autotune: Any, tmp_path: Path) -> None:
    config = config_of("Llama-3-8B", tmp_path)
    code, out, _ = autotune("plan", config, "--gpu", "L4", "--context", "8192", "--sessions", "10")
    assert code == 1
    assert "10 sessions of 8192 tokens, native, blocks of 16: DOES NOT FIT" in out
    assert "would do: kv_format int4 holds" in out
    assert "loses 2.70% (estimated)" in out
    assert "would do: eviction heavy_hitter with keep_tokens 2048 holds 20, loses 3.74% (estimated)" in out  # the least
    assert "would do: A100 (" in out
    plan = planned(autotune, config, "--gpu", "L4", "--context", "8192", "--sessions", "10", "--kv-format", "int4")
    assert plan["fits"]
    by_format = {row["kv_format"]: row for row in plan["formats"]}
    assert by_format["native"]["sessions"] < 10 <= by_format["int4"]["sessions"]
    assert 0.70 < by_format["int4"]["saved"] < 0.75
    assert by_format["native"]["saved"] == by_format["native"]["loss"] == 0


def test_weights_that_do_not_fit(autotune: Any, tmp_path: Path) -> None:
    code, out, _ = autotune("plan", config_of("Llama-3-8B", tmp_path), "--gpu", "12G", "--sessions", "1")
    assert code == 1
    assert "device: DOES NOT FIT: 15.0 GiB of weights do not fit" in out
    assert "would do: L4" in out
    plan = planned(autotune, config_of("Llama-3-8B", tmp_path), "--gpu", "L4", "--kv-pool-bytes", "20G")
    device = plan["verdicts"][0]
    assert (device["what"], device["fits"]) == ("device", False)
    assert "more than L4 has" in device["found"]


def test_host_memory_and_processor(autotune: Any, tmp_path: Path) -> None:
    config = config_of("Qwen2.5-7B", tmp_path)
    told = planned(autotune, config, "--gpu", "H200")
    assert [verdict["fits"] for verdict in told["verdicts"]] == [True, None, None]
    few = planned(autotune, config, "--gpu", "H200", "--cpu", "1", "--host-memory", "32G", "--host-pool-bytes", "64G")
    processor, host = few["verdicts"][-2:]
    assert (processor["fits"], host["fits"]) == (False, False)
    assert any("2 cores" in remedy for remedy in processor["remedies"])
    assert any("--host-pool-bytes" in remedy for remedy in host["remedies"])
    assert few["formats"][0]["host_sessions"] > 0
    enough = planned(autotune, config, "--gpu", "H200", "--cpu", "8", "--host-memory", "128G")
    assert enough["fits"]


def test_on_a_processor_everything_is_host_memory(autotune: Any) -> None:
    plan = planned(autotune, str(MODEL), "--gpu", "cpu", "--host-memory", "8G", "--cpu", "2")
    assert plan["fits"]
    assert plan["memory"]["packed"] > 0
    assert plan["memory"]["pool"] == 1 << 30
    small = planned(autotune, str(MODEL), "--gpu", "cpu", "--host-memory", "8G", "--kv-pool-bytes", "10G")
    assert not small["fits"]


def test_losses_are_the_profiles_where_one_is_given(autotune: Any, tmp_path: Path) -> None:
    measured = planned(autotune, str(MODEL), "--gpu", "cpu", "--profile", str(PROFILE))
    assert not measured["quality"]["estimated"]
    usual = planned(autotune, str(MODEL), "--gpu", "cpu")
    assert usual["quality"]["estimated"]
    losses = [{row["kv_format"]: row["loss"] for row in plan["formats"]} for plan in (measured, usual)]
    assert losses[0]["int4"] < 0.001 < losses[1]["int4"]
    assert measured["formats"][0]["step_s"] > 0
    code, _, err = autotune("plan", config_of("Llama-3-8B", tmp_path), "--profile", str(PROFILE))
    assert (code, len(err.splitlines())) == (1, 1)
    assert "a model of another shape" in err


@pytest.mark.parametrize(
    ("code", "words", "arguments"),
    [
        (1, "model folder /nope does not exist", ["/nope"]),
        (1, "holds no config.json", ["FOLDER"]),
        (1, "--gpu 'abacus' is not known", ["MODEL", "--gpu", "abacus"]),
        (1, "takes 1 to 4096 tokens", ["MODEL", "--context", "5000"]),
        (1, "takes 1 to 4096 tokens", ["MODEL", "--context", "2048,0"]),
        (2, "--context '1e3'", ["MODEL", "--context", "1e3"]),
        (2, "--context '9999999999999'", ["MODEL", "--context", "9999999999999"]),
        (2, "--sessions", ["MODEL", "--sessions", "0"]),
        (2, "kv_format", ["MODEL", "--kv-format", "fp8"]),
        (2, "block_size", ["MODEL", "--block-size", "24"]),
        (2, "--kv-pool-bytes", ["MODEL", "--kv-pool-bytes", "1X"]),
        (2, "--host-memory", ["MODEL", "--host-memory", "-1"]),
        (1, "dtype 'fp8'", ["MODEL", "--dtype", "fp8"]),
        (1, "--protect-layers 7", ["MODEL", "--protect-layers", "7"]),
        (1, "profile cannot be read", ["MODEL", "--profile", "/nope.yaml"]),
        (1, "quality table cannot be read", ["MODEL", "--quality", "/nope.json"]),
        (1, "cannot be read as JSON", ["BROKEN"]),
        (1, "is not supported", ["FOREIGN"]),
    ],
)
def test_mistakes_are_one_line(autotune: Any, tmp_path: Path, code: int, words: str, arguments: list[str]) -> None:
    broken, foreign = tmp_path / "broken.json", tmp_path / "foreign.json"
    broken.write_text("{")
    foreign.write_text('{"architectures": ["BertModel"]}')
    (tmp_path / "empty").mkdir()
    places = {"MODEL": MODEL, "FOLDER": tmp_path / "empty", "BROKEN": broken, "FOREIGN": foreign}
    result = autotune("plan", *(str(places.get(argument, argument)) for argument in arguments))
    assert result[:2] == (code, ""), result
    assert len(result[2].splitlines()) == 1, result
    assert words in result[2]


def test_an_impossible_pool_is_a_verdict(autotune: Any) -> None:
    for size in ("1K", "9T"):
        plan = planned(autotune, str(MODEL), "--gpu", "24G", "--kv-pool-bytes", size, "--sessions", "3")
        assert not plan["fits"]
        assert plan["formats"][0]["sessions"] in {None, 0} or size == "9T"


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": (1 << 62)},
        {"hidden_size": 1 << 40, "head_dim": 128},
        {"vocab_size": 1 << 60},
        {"num_hidden_layers": 10_000},
        {"num_key_value_heads": 1, "head_dim": 8},
        {"max_position_embeddings": 1},
    ],
)
def test_models_beyond_any_machine_are_answered_too(autotune: Any, tmp_path: Path, changes: dict[str, Any]) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**PUBLISHED["Llama-3-8B"][0], **changes}))
    contexts = ["--context", "999999999999"] if changes.get("max_position_embeddings", 0) > 1 else []
    for gpu in ("H200", "cpu", "1"):
        code, out, err = autotune("plan", str(path), "--gpu", gpu, "--sessions", "1000000000", *contexts)
        assert (code, err) == (1, ""), (gpu, err)
        assert "DOES NOT FIT" in out


def test_plan_needs_no_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from autotune.cli import app\n"
        f"code = app(['plan', {str(MODEL)!r}, '--gpu', 'L4'], standalone_mode=False)\n"
        "assert code == 0, code\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "KV bytes per token: native 3,072" in done.stdout
