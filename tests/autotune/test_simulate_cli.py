"""``autotune simulate`` and ``autotune profile`` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from typer.testing import CliRunner

from autotune.cli import app
from autotune.cli._shared import CliError
from autotune.simulation.report import notes_on
from envs.profile import read_profile
from envs.simulated import DEFAULT_PROFILE, SimulatedEngine
from envs.workload.trace import TraceRequest, from_requests
from policies.evaluation.calibration import calibrate
from policies.evaluation.scenarios import Scenario, Span
from policies.named import contender
from policies.play import Played, play
from policies.tails import Tail

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "rope_theta": 10000.0, "torch_dtype": "bfloat16",
}  # fmt: skip


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def trace_file(path: Path, number: int = 40) -> Path:
    rows = "".join(f"{i * 0.5},{100 + 37 * (i % 9)},{20 + i % 30}\n" for i in range(number))
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + rows)
    return path


def test_policies_are_compared_on_the_same_traffic(tmp_path: Path) -> None:
    result = run(
        "simulate", trace_file(tmp_path / "t.csv"), "--policy", "default", "--compare", "none",
        "--compare", "static:kv_format=int4,block_size=64", "--compare", "predictor", "--json", tmp_path / "r.json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "ESTIMATED" in result.output
    document = json.loads((tmp_path / "r.json").read_text())
    assert document["estimated"] is True
    assert len(document["profile_digest"]) == 64
    names = ["default", "none", "static:kv_format=int4,block_size=64", "predictor"]
    assert [one["name"] for one in document["policies"]] == names
    for one in document["policies"]:
        assert one["offered"] == one["completed"] == 40
        assert one["ttft_p50_s"] <= one["ttft_p90_s"] <= one["ttft_p99_s"]
    assert document["policies"][1]["quality_per_token"] == 0
    assert document["policies"][2]["quality_per_token"] > 0


def test_the_report_is_one_wellformed_file(tmp_path: Path) -> None:
    report = tmp_path / "r.html"
    result = run("simulate", trace_file(tmp_path / "<t>.csv"), "--compare", "none", "--html", report)
    assert result.exit_code == 0, result.output
    text = report.read_text()
    assert "Estimated." in text
    assert "&lt;t&gt;.csv" in text
    assert "<script" not in text
    assert "http" not in text
    figures = text.split("<svg")[1:]
    assert len(figures) == 8  # two side by side, three per policy
    for figure in figures:
        ET.fromstring("<svg" + figure.split("</svg>")[0] + "</svg>")
        assert "nan" not in figure


def test_the_same_seed_gives_the_same_figures(tmp_path: Path) -> None:
    def figures(seed: int) -> Any:
        place = tmp_path / "r.json"
        result = run(
            "simulate", "reasoning-bursty", "--rate-scale", 0.05, "--duration", 60, "--seed", seed, "--json", place
        )
        assert result.exit_code == 0, result.output
        document = json.loads(place.read_text())["policies"]
        return [{name: value for name, value in one.items() if name != "wall_s"} for one in document]

    assert figures(3) == figures(3)
    assert figures(3) != figures(4)


def test_columns_that_are_the_same_are_explained(tmp_path: Path) -> None:
    """A load that needs no tuning: two equal columns, and hits as a dash, used to stand there without a word."""
    result = run("simulate", trace_file(tmp_path / "t.csv", 5), "--compare", "none", "--html", tmp_path / "r.html")
    assert result.exit_code == 0, result.output
    told = " ".join(result.output.split())
    assert "default and none came out the same, whatever was changed (the KV pool was at most " in told
    assert "hits: -, as no prompts of this workload begin alike" in told
    assert "came out the same" in (tmp_path / "r.html").read_text()


def test_columns_that_differ_are_not_called_the_same() -> None:
    one, other, alike = (Played(name, completed=n, queried_tokens=9) for name, n in (("a", 1), ("b", 2), ("c", 2)))
    assert notes_on([one, other]) == []
    (note,) = notes_on([one, other, alike])
    assert note.startswith("b and c came out the same, as nothing was changed")
    assert notes_on([]) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nonsense"], "nor a built-in workload"),
        (["chat-steady", "--policy", "nix"], "predictor, learned:FOLDER, auto, unbudgeted:NAME, default, literature"),
        (["chat-steady", "--compare", "/nowhere"], "no such rules file, nor a policy; known: none, static:"),
        (["chat-steady", "--policy", "static:kv_format"], "static:KNOB=VALUE"),
        (["chat-steady", "--policy", "static:kv_format=int3"], "int3"),
        (["chat-steady", "--interval", "0"], "--interval"),
        (["chat-steady", "--interval", "1e-12"], "--interval"),
        (["chat-steady", "--interval", "inf"], "--interval"),
        (["chat-steady", "--duration", "inf"], "--duration"),
        (["chat-steady", "--duration", "nan"], "--duration"),
        (["chat-steady", "--rate-scale", "1e-300"], "--rate-scale"),
        (["chat-steady", "--tbt-target", "1e300"], "targets must be"),
        (["chat-steady", "--html", "/"], "/: cannot be written"),
        (["chat-steady", "--json", "/nowhere/j"], "/nowhere/j: cannot be written"),
        (["chat-steady", "--kv-pool-bytes", "many"], "many"),
        (["chat-steady", "--kv-pool-bytes", "1K"], "too small"),
        (["chat-steady", "--profile", "/nowhere.yaml"], "cannot be read"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], message: str) -> None:
    result = run("simulate", *arguments)
    assert isinstance(result.exception, CliError)
    assert message in str(result.exception)
    assert "\n" not in str(result.exception)


def test_a_trace_of_half_a_century_asks_how_much_of_it_to_play(tmp_path: Path) -> None:
    place = tmp_path / "t.csv"
    place.write_text("arrival_s,prompt_tokens,output_tokens\n0,10,10\n1700000000,10,10\n")
    refused = run("simulate", place).exception
    assert isinstance(refused, CliError)
    assert "say with --duration" in str(refused)
    assert run("simulate", place, "--duration", "5", "--policy", "none").exit_code == 0


def test_a_policy_acts_and_is_journalled_with_its_scenario() -> None:
    """An overload of the default environment: the default rules go down to int8, doing nothing does not."""
    trace = from_requests("rush", [TraceRequest(0.05 * i, 600, 150) for i in range(200)])
    played = []
    for text in ("default", "none"):
        env = SimulatedEngine(workload=trace, rate_scale=1.0, interval_s=1.0, warm_up_s=0.0, repeats=False)
        played.append(play(env, contender(text), duration_s=60.0, interval_s=1.0, seed=0))
    assert any(move.change == "kv_format=int8" and move.scenario for move in played[0].moves)
    assert not played[1].moves
    assert played[0].completed > played[1].completed
    assert len(played[0].rows) == 60


def test_tails_are_good_to_a_per_cent() -> None:
    tail = Tail()
    assert tail.quantile_s(0.5) is None
    for number in range(1, 1001):
        tail.add(number * 10**6)
    for q in (0.01, 0.5, 0.9, 0.99):
        assert tail.quantile_s(q) == pytest.approx(q, rel=0.011)
    tail.add_all({10**12: 10**6})
    assert tail.quantile_s(0.5) == pytest.approx(1000.0, rel=0.011)


def test_an_analytic_profile_from_a_configuration_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    result = run("profile", tmp_path / "config.json", "--analytic", "L4", "-o", tmp_path / "p.yaml")
    assert result.exit_code == 0, result.output
    assert "estimated" in result.output
    profile = read_profile(tmp_path / "p.yaml")
    assert profile.is_estimated
    result = run("simulate", trace_file(tmp_path / "t.csv", 5), "--profile", tmp_path / "p.yaml", "--policy", "none")
    assert result.exit_code == 0, result.output


def test_profile_refuses_unknown_devices_and_places(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    for arguments, message in (
        (["--analytic", "Z80"], "choose one of"),
        (["--analytic", "L4", "-o", tmp_path / "no" / "p.yaml"], "cannot be written"),
        (["--from-metrics", "http://127.0.0.1:1", "--duration", "1"], "too few readings"),
        (["--from-metrics", "http://127.0.0.1:1"], "127.0.0.1:1"),
    ):
        result = run("profile", tmp_path / "config.json", *arguments)
        assert isinstance(result.exception, CliError)
        assert message in str(result.exception)


def test_a_load_beyond_capacity_is_said_in_one_line(tmp_path: Path) -> None:
    result = run("simulate", "reasoning-long", "--policy", "none", "--duration", 60)
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if "beyond capacity" in line]
    assert len(lines) == 1
    assert "none served" in lines[0]
    assert "--rate-scale" in lines[0]
    report = tmp_path / "r.html"
    assert "beyond capacity" not in run("simulate", trace_file(tmp_path / "t.csv"), "--html", report).output
    assert "beyond capacity" not in report.read_text()


def test_a_host_tier_can_be_simulated(tmp_path: Path) -> None:
    arguments = ("simulate", trace_file(tmp_path / "t.csv"), "--policy", "static:host_offload=on")
    result = run(*arguments, "--host-pool-bytes", "1G")
    assert result.exit_code == 0, result.output
    refused = run(*arguments).exception
    assert isinstance(refused, CliError)
    assert refused.code == 2
    assert "--host-pool-bytes" in str(refused)


@pytest.mark.parametrize("verb", ["simulate", "replay"])
def test_an_unknown_workload_is_a_wrong_argument(verb: str) -> None:
    refused = run(verb, "/no/such.csv").exception
    assert isinstance(refused, CliError)
    assert refused.code == 2


def test_targets_that_are_not_given_are_those_of_evaluation(tmp_path: Path) -> None:
    """For the profile, its pool and the workload; whoever names one gets that one."""
    place, profile = tmp_path / "r.json", read_profile(DEFAULT_PROFILE)

    def told(source: object, *more: object) -> tuple[float, float]:
        arguments = ("--policy", "none", "--rate-scale", 0.05, "--duration", 20, "--json", place)
        result = run("simulate", source, *arguments, *more)
        assert result.exit_code == 0, result.output
        assert ("as autotune evaluate fixes them" in result.output) == ("--tbt-target" not in more)
        assert "targets: first token " in result.output
        document = json.loads(place.read_text())
        return document["ttft_target_s"], document["tbt_target_s"]

    def fixed(source: object, length_scale: float = 1.0) -> tuple[float, float]:
        scenario = Scenario(str(source), str(source))
        found = calibrate(profile, [scenario], Span(20.0, length_scale))[str(source)].targets
        return found.ttft_s, found.tbt_s

    trace = trace_file(tmp_path / "t.csv")
    assert told("chat-steady") == fixed("chat-steady")
    assert told(trace) == fixed(trace)
    assert told(trace, "--length-scale", 2) == fixed(trace, 2.0) != fixed(trace)
    assert told(trace, "--ttft-target", 3) == (3.0, fixed(trace)[1])
    assert told(trace, "--ttft-target", 3, "--tbt-target", 0.5) == (3.0, 0.5)


def test_who_is_held_to_no_budget_is_marked(tmp_path: Path) -> None:
    result = run("simulate", trace_file(tmp_path / "t.csv", 5), "--policy", "literature", "--json", tmp_path / "r.json")
    assert result.exit_code == 0, result.output
    assert "literature (no budget)" in result.output
    assert json.loads((tmp_path / "r.json").read_text())["policies"][0]["budgeted"] is False
