"""A quality table belongs to one model, and the gate refuses what is over the budget with its figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import engine
from engine.arguments import options_from, parser
from engine.assembly import assemble
from engine.errors import EngineError
from engine.loader import LoadedModel
from engine.options import EngineOptions
from engine.quality.digest import model_digest
from engine.quality.gate import QualityBudget, QualityGate, quality_gate
from engine.quality.table import QualityTable, read_table, write_table
from engine.tunable_state import Patch, TunableState
from engine.tunables import default_values

MakeTable = Callable[..., QualityTable]
BUNDLED = Path(engine.__file__).parent / "bundled" / "model"


def test_a_table_survives_its_file_and_is_refused_for_another_model(
    make_table: MakeTable, loaded: LoadedModel, other_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "quality.json"
    write_table(make_table(model_digest(loaded.folder), int8=0.1), path)
    table = read_table(path)
    assert table == make_table(model_digest(loaded.folder), int8=0.1)
    table.check_model(loaded.folder)
    with pytest.raises(EngineError, match=r"quality.json belongs to tiny .* not to .*other"):
        table.check_model(other_model, path.name)
    with pytest.raises(EngineError, match="belongs to tiny"):
        quality_gate(path, other_model, QualityBudget(), default_values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no quality table"),
        ("{}", "is no quality table of this version \\(model: Field required\\)"),
        (None, "cannot be read: No such file"),
    ],
)
def test_what_is_no_table_is_one_line(content: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(EngineError, match=message) as caught:
        read_table(path)
    assert "\n" not in str(caught.value)


def test_figures_that_are_no_numbers_are_refused(make_table: MakeTable, tmp_path: Path) -> None:
    document = json.loads(make_table(int8=0.1).model_dump_json())
    document["settings"]["int8"]["generated"]["after_prompt"]["top1"] = 1.5
    (tmp_path / "quality.json").write_text(json.dumps(document))
    with pytest.raises(EngineError, match=r"settings.int8.generated.after_prompt.top1"):
        read_table(tmp_path / "quality.json")


def test_the_gate_refuses_with_the_figures(make_table: MakeTable) -> None:
    gate = QualityGate(make_table(int8=0.1, int4=0.7), QualityBudget(0.5))
    assert gate("kv_format", "native") is None
    assert gate("kv_format", "int8") is None
    assert gate("block_size", 32) is None
    assert gate("kv_format", "int4") == (
        "kv_format int4 is over the quality budget of tiny: perplexity +0.70 % of 0.5 % allowed "
        "(KL 0.01, top-1 agreement 95.0%, 98% of 50 passkeys)"
    )
    assert gate("kv_format", "k8v4") == "kv_format k8v4: the quality table of tiny has no figures for it"
    strict = QualityGate(make_table(int8=0.1), QualityBudget(0.5, top1=0.97))
    assert "top-1 agreement 95.0% of at least 97.0%" in (strict("kv_format", "int8") or "")


def test_a_refused_patch_changes_nothing(make_table: MakeTable) -> None:
    gate = QualityGate(make_table(int8=0.1, int4=0.7), QualityBudget(0.5))
    state = TunableState(default_values(), 0, gate)
    refusal = state.refusal(Patch({"kv_format": "int4", "block_size": 32}, "operator:anna"))
    assert refusal is not None
    assert refusal.http_status == 422
    assert "perplexity +0.70 %" in refusal.results["kv_format"].why
    assert refusal.results["block_size"].why == "not applied: kv_format in the same request was rejected"
    assert state.refusal(Patch({"kv_format": "int8"}, "operator:anna")) is None


def test_an_engine_with_a_table_refuses_at_start_and_by_patch(make_table: MakeTable, tmp_path: Path) -> None:
    path = tmp_path / "quality.json"
    write_table(make_table(model_digest(BUNDLED), int8=0.1, int4=0.7), path)
    start = ["--model", str(BUNDLED), "--kv-pool-bytes", "16M", "--quality-table", str(path)]
    with pytest.raises(EngineError, match=r"kv_format int4 is over the quality budget of tiny: perplexity \+0.70 %"):
        assemble(options_from(parser().parse_args([*start, "--set", "kv_format=int4"])))
    core = assemble(options_from(parser().parse_args([*start, "--device", "cpu", "--set", "kv_format=int8"]))).core
    assert core.patch(Patch({"kv_format": "int4"}, "autotune")).results["kv_format"].status == "rejected"
    assert core.tunables_json()["desired"]["kv_format"] == "int8"
    generous = options_from(parser().parse_args([*start, "--quality-budget", "0.8", "--set", "kv_format=int4"]))
    assert generous.quality_budget_pct == 0.8
    assert quality_gate(path, BUNDLED, QualityBudget(generous.quality_budget_pct), generous.initial_values())


def test_without_a_table_nothing_is_gated() -> None:
    assert EngineOptions(model=BUNDLED).quality_table is None
    assert TunableState(default_values(), 0).refusal(Patch({"kv_format": "int4"}, "x")) is None
