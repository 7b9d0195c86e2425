"""Rules and pages for Prometheus: clean by promtool's word, and nothing in them that nobody serves."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from known_metrics import engine_page, known_metrics, names_in, problems_of
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from autotune.metrics import DaemonMetrics, Snapshot
from engine.stats import EngineStats, ResidentBytes
from engine.tunables import default_values
from policies.strict_yaml import load_strict

FOLDER = Path(__file__).parents[2] / "deploy/prometheus"
RULES = FOLDER / "kv-autotune.rules.yml"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (Debian: prometheus)")


def rules() -> list[dict[str, Any]]:
    return [rule for group in load_strict(RULES.read_text())["groups"] for rule in group["rules"]]


def promtool(*arguments: str, given: str = "") -> tuple[int, str]:
    done = subprocess.run(
        [str(PROMTOOL), *arguments], input=given, capture_output=True, text=True, cwd=FOLDER, check=False, timeout=60
    )
    return done.returncode, done.stdout + done.stderr


@needs_promtool
def test_configuration_and_rules_are_clean() -> None:
    code, said = promtool("check", "config", "--lint-fatal", "prometheus.yml")
    assert code == 0, said
    code, said = promtool("check", "rules", "--lint=all", "--lint-fatal", RULES.name)
    assert code == 0, said
    assert f"{len(rules())} rules found" in said


@needs_promtool
def test_alerts_fire_when_they_should_and_not_else() -> None:
    code, said = promtool("test", "rules", "kv-autotune.rules.test.yml")
    assert code == 0, said


def daemon_page() -> str:
    registry = CollectorRegistry()
    metrics = DaemonMetrics(registry)
    reading = EngineStats("example", "example", 1, 4096, 64, 1, default_values())
    reading.gauges.resident.append(ResidentBytes("native", 16, 1, 1))
    metrics.snapshot = Snapshot(reading=reading)
    metrics.count_decision("kv_format", "int8", "example", "autotune", "applied")
    return generate_latest(registry).decode()


@needs_promtool
@pytest.mark.parametrize("page", [daemon_page, engine_page], ids=["daemon", "engine"])
def test_our_pages_are_clean(page: Any) -> None:
    assert promtool("check", "metrics", given=page()) == (0, "")
    bad = "# TYPE autotune_things counter\nautotune_things 1\n"
    assert promtool("check", "metrics", given=bad)[0] != 0, "promtool finds nothing wrong with anything"


def test_rules_name_only_what_is_served() -> None:
    known, recorded = known_metrics(), frozenset(rule["record"] for rule in rules() if "record" in rule)
    assert len(recorded) > 5
    for rule in rules():
        assert names_in(rule["expr"]), rule
        assert list(problems_of(rule["expr"], known, recorded)) == [], rule["expr"]


def test_what_is_not_served_would_be_found() -> None:
    known = known_metrics()
    for expression, problem in (
        ("rate(autotune_request_total[5m])", "nobody serves autotune_request_total"),
        ('autotune_requests_total{outcom="failed"}', "autotune_requests_total has no label outcom"),
        ('autotune_requests_total{outcome=~"failed|refused"}', "autotune_requests_total: outcome is never refused"),
        ("instance:autotune_gone:sum", "nobody serves instance:autotune_gone:sum"),
        ('autotune_decisions_total{verdict="applyed"}', "autotune_decisions_total: verdict is never applyed"),
    ):
        assert list(problems_of(expression, known)) == [problem]


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts) > 10
    for rule in alerts:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert {"summary", "description"} == set(rule["annotations"])


def test_every_alert_is_tried() -> None:
    tests = load_strict((FOLDER / "kv-autotune.rules.test.yml").read_text())["tests"]
    fired = {one["alertname"] for test in tests for one in test["alert_rule_test"] if one.get("exp_alerts")}
    silent = {one["alertname"] for test in tests for one in test["alert_rule_test"] if not one.get("exp_alerts")}
    assert {rule["alert"] for rule in rules() if "alert" in rule} == fired
    assert silent < fired
    assert len(silent) > 8
