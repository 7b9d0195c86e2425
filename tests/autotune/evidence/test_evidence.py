"""Claims are judged by figures: other figures, other verdicts; a figure that is missing leaves its claim open."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from autotune.evidence import __main__ as command
from autotune.evidence.arithmetic import LLAMA_2_7B, LLAMA_2_13B, LLAMA_3_8B, PublicModel
from autotune.evidence.claims import CLAIMS
from autotune.evidence.finding import Verdict, better
from autotune.evidence.page import page
from autotune.evidence.sources import SOURCES, Inputs
from autotune.evidence.stateless import times
from engine.cache_bench.registry import load_rows
from envs.profile import read_profile

PROFILE = Path(__file__).parents[3] / "envs" / "profiles" / "bundled_cpu.yaml"


def documents() -> dict[str, dict[str, Any]]:
    """Last lines as the benchmarks print them, with the figures of an ordinary day."""
    return {
        "cache": {
            "throughput_256_over_128": 1.1, "wasted_pool_pct": {"16": 2.8}, "alloc_overhead_reduction_pct": 95.0,
            "bits_per_element": {"int4": 4.75}, "capacity_ratio_int4_end_to_end": 3.1,
        },
        "quality": {
            "perplexity_increase_pct": {"int8": 0.0, "k8v4": 0.1, "int4": 0.2},
            "perplexity_top1": {"int8": 0.99, "k8v4": 0.99, "int4": 0.988}, "window_quality_ratio": 0.998,
            "window_passkey_ratio": 0.31, "heavy_hitter_passkey_ratio": 1.0,
        },
        "tier": {
            "offload_tbt_p50_ratio": 1.02, "offload_ttft_p95_ratio": 1.0,
            "offload_gain": {"1": 0.99, "8": 1.6, "32": 1.5},
            "tier_share_of_ceiling": 0.85, "tier_ttft_p90_ms": 140.0,
        },
        "kernels": {"decode_ratio_vs_sdpa": {"2048": 2.7}, "decode_ratio_vs_folded": {"2048": 2.1}},
        "cost": {
            "cost_reduction_pct": {"value": 20.0, "low": 10.0, "high": 30.0}, "goodput_ratio_pressure": {"value": 1.3},
        },
        "stateless": {
            "stateless_ms": {
                "16": {"computed": 1.0, "on_host": 2.0}, "1024": {"computed": 40.0, "on_host": 5.0},
            },
            "crossover_tokens": 48,
        },
    }  # fmt: skip


VERDICTS = {
    "C1": Verdict.FALSE, "C2": Verdict.FALSE, "C3": Verdict.BEATEN, "C4": Verdict.PARTLY, "C5": Verdict.BEATEN,
    "C6": Verdict.PARTLY, "C7": Verdict.PARTLY, "C8": Verdict.PARTLY, "C9": Verdict.FALSE, "C10": Verdict.PARTLY,
    "stateless": Verdict.MET,
}  # fmt: skip


def test_every_claim_of_the_survey_is_there() -> None:
    assert list(CLAIMS) == [*(f"C{number}" for number in range(1, 11)), "stateless"]
    assert {source for claim in CLAIMS.values() for source in claim.sources} == set(SOURCES)


@pytest.mark.parametrize("name", CLAIMS)
def test_an_ordinary_day(name: str) -> None:
    assert CLAIMS[name].found(documents()).verdict is VERDICTS[name]


@pytest.mark.parametrize(
    ("name", "source", "key", "value", "verdict"),
    [
        ("C1", "cache", "throughput_256_over_128", 0.6, Verdict.MET),
        ("C1", "cache", "throughput_256_over_128", 0.8, Verdict.PARTLY),
        ("C3", "cache", "alloc_overhead_reduction_pct", 62.5, Verdict.MET),
        ("C3", "cache", "alloc_overhead_reduction_pct", 40.0, Verdict.FALSE),
        ("C4", "cache", "bits_per_element", {"int4": 4.0}, Verdict.MET),
        ("C4", "quality", "perplexity_top1", {"k8v4": 0.9, "int4": 0.8}, Verdict.FALSE),
        ("C5", "kernels", "decode_ratio_vs_sdpa", {"2048": 1.2}, Verdict.FALSE),
        ("C6", "quality", "window_passkey_ratio", 0.95, Verdict.BEATEN),
        ("C6", "quality", "window_quality_ratio", 0.8, Verdict.FALSE),
        ("C7", "tier", "offload_gain", {"1": 1.0, "8": 1.1, "32": 0.8}, Verdict.MET),
        ("C7", "tier", "offload_tbt_p50_ratio", 1.3, Verdict.FALSE),
        ("C8", "tier", "offload_gain", {"1": 1.0, "8": 3.5, "32": 3.0}, Verdict.BEATEN),
        ("C8", "tier", "tier_ttft_p90_ms", 400.0, Verdict.FALSE),
        ("C9", "cost", "cost_reduction_pct", {"value": 65.0, "low": 60.0, "high": 70.0}, Verdict.BEATEN),
        ("stateless", "stateless", "stateless_ms", {
            "16": {"computed": 3.0, "on_host": 2.0}, "1024": {"computed": 40.0, "on_host": 5.0},
        }, Verdict.FALSE),
    ],
)  # fmt: skip
def test_other_figures_other_verdicts(name: str, source: str, key: str, value: Any, verdict: Verdict) -> None:
    changed = documents()
    changed[source][key] = value
    assert CLAIMS[name].found(changed).verdict is verdict


@pytest.mark.parametrize("name", [name for name, claim in CLAIMS.items() if claim.sources])
def test_a_missing_figure_leaves_a_claim_open(name: str) -> None:
    finding = CLAIMS[name].found({})
    assert finding.verdict is Verdict.OPEN
    assert "has no" in finding.figures
    nulls = {source: dict.fromkeys(found) for source, found in documents().items()}
    assert CLAIMS[name].found(nulls).verdict is Verdict.OPEN


def test_two_per_cent_are_no_difference() -> None:
    assert [better(value, 100.0) for value in (97.9, 98.1, 101.9, 102.1)] == [
        Verdict.FALSE, Verdict.MET, Verdict.MET, Verdict.BEATEN,
    ]  # fmt: skip


def test_a_13b_model_holds_the_right_number_of_bytes() -> None:
    assert LLAMA_2_13B.kv_bytes(4096) == 40 * 40 * 128 * 2 * 2 * 4096
    assert LLAMA_2_13B.sessions(24e9, 4096, 0.9) < 0


@pytest.mark.parametrize(("model", "billions"), [(LLAMA_2_7B, 6.74), (LLAMA_2_13B, 13.02), (LLAMA_3_8B, 8.03)])
def test_shapes_give_as_many_parameters_as_were_published(model: PublicModel, billions: float) -> None:
    assert round(model.parameters.total / 1e9, 2) == billions


@pytest.mark.parametrize("source", SOURCES.values(), ids=list(SOURCES))
def test_sources_name_modules_and_rows_that_exist(source: Any, tmp_path: Path) -> None:
    parts = source.command(Inputs(tmp_path, tmp_path, tmp_path, quick=True))
    assert importlib.util.find_spec(parts[2]) is not None
    assert not any("{" in part for part in parts)
    if parts[2] == "engine.cache_bench":
        load_rows(parts[parts.index("--rows") + 1].split(","))
    without = source.command(Inputs(tmp_path))
    assert "--text" not in without
    assert "--traces" not in without


def test_what_was_measured_is_kept_and_only_what_is_needed_is_run(tmp_path: Path) -> None:
    ran: list[str] = []

    def run(command: list[str]) -> tuple[int, str]:
        ran.append(command[2])
        return 0, json.dumps(documents()["kernels"])

    for _ in range(2):
        found = command.measure([CLAIMS["C5"], CLAIMS["C2"]], Inputs(tmp_path), run)
    assert ran == ["kernels.bench"]
    assert found == {"kernels": documents()["kernels"]}
    command.measure([CLAIMS["C5"]], Inputs(tmp_path), run, again=True)
    assert len(ran) == 2
    assert command.measure([CLAIMS["C2"]], Inputs(tmp_path, quick=True), run) == {}  # a look is no measurement


@pytest.mark.parametrize("last", ["", "no JSON", "[1]"])
def test_a_source_that_fails_leaves_its_claims_open(
    last: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.measure([CLAIMS["C5"]], Inputs(tmp_path), lambda _: (1, last)) == {}
    assert "no JSON" in capsys.readouterr().err


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--only", "C2,C10", "--folder", str(tmp_path), "--page", str(tmp_path / "page.md")]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["C2"] == {"verdict": "shown false", "figures": CLAIMS["C2"].found({}).figures}
    text = (tmp_path / "page.md").read_text(encoding="utf-8")
    assert all(f"| {name} |" in text for name in CLAIMS)
    assert "not measured" in text  # the others
    assert command.main(["--only", "C11", "--folder", str(tmp_path)]) == 2
    assert "C11" in capsys.readouterr().err


def test_the_last_line_of_a_command_and_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    code, last = command.run(["sh", "-c", 'echo one; echo "{}"; exit 3'])
    assert (code, last) == (3, "{}")
    assert "one" in capsys.readouterr().out


def test_the_page_has_commands_of_what_was_used() -> None:
    found = {name: claim.found(documents()) for name, claim in CLAIMS.items()}
    text = page(found, [*CLAIMS.values()], {"device": "cpu", "processors": 2, "versions": {"torch": "2"}}, "2026-01-01")
    assert "python -m kernels.bench --dtype bfloat16" in text
    assert "--text DIR" in text
    assert "| C1, C3, C4 |" in text


def test_short_prompts_by_a_profile() -> None:
    found = times(read_profile(PROFILE), lengths=(16, 1024))
    row = found["stateless_ms"]
    assert row["16"]["on_device"] < row["16"]["on_host"]
    assert row["1024"]["computed"] > row["16"]["computed"]
    assert found["link_emulated"] is True
    with pytest.raises(ValueError, match="without a link"):
        times(read_profile(PROFILE).model_copy(update={"offload": None}))
