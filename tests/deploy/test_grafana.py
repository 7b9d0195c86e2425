"""The Grafana dashboard: whole by its schema, nothing in it that nobody serves, a unit to every panel."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from known_metrics import OF_THE_SCRAPE, Known, known_metrics, names_in, problems_of

from autotune.grafana import dashboard

FOLDER = Path(__file__).parents[2] / "deploy/grafana"
SCHEMA = json.loads(Path(__file__).with_name("grafana_schema.json").read_text())
LEGEND = re.compile(r"\{\{(\w+)\}\}")


@pytest.fixture(scope="module")
def known() -> Known:
    return known_metrics()


@pytest.fixture
def shipped() -> dict[str, Any]:
    document: dict[str, Any] = json.loads((FOLDER / "kv-autotune.json").read_text())
    return document


def panels(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in document["panels"] if panel["type"] != "row"]


def faults(document: dict[str, Any]) -> list[str]:
    schemas = pytest.importorskip("jsonschema_rs", reason="jsonschema-rs is not installed (pip install -e '.[dev]')")
    return [error.message for error in schemas.validator_for(SCHEMA).iter_errors(document)]


def test_it_is_whole_by_its_schema(shipped: dict[str, Any]) -> None:
    assert faults(shipped) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lambda d: panels(d)[0]["fieldConfig"]["defaults"].pop("unit"),
        lambda d: panels(d)[0]["fieldConfig"]["defaults"].update(unit="parsecs"),
        lambda d: panels(d)[0].update(type="grph"),
        lambda d: panels(d)[0]["targets"][0].pop("expr"),
        lambda d: panels(d)[0]["targets"].clear(),
        lambda d: panels(d)[0]["gridPos"].update(x=24),
        lambda d: panels(d)[0].update(datasource={"type": "prometheus", "uid": "mine"}),
        lambda d: d.pop("templating"),
        lambda d: d["annotations"]["list"][0].update(expression="x"),
        lambda d: d.update(schemaVersion="39"),
    ],
)
def test_the_schema_finds_what_is_wrong(shipped: dict[str, Any], spoil: Callable[[dict[str, Any]], Any]) -> None:
    spoilt = copy.deepcopy(shipped)
    spoil(spoilt)
    assert faults(spoilt)


def test_it_is_what_the_declarations_make(shipped: dict[str, Any]) -> None:
    assert shipped == dashboard(), "run python -m autotune.docs"


def test_everything_that_is_asked_for_is_served(shipped: dict[str, Any], known: Known) -> None:
    asked = [target["expr"] for panel in panels(shipped) for target in panel["targets"]]
    asked += [one["expr"] for one in shipped["annotations"]["list"]]
    asked += [one["definition"] for one in shipped["templating"]["list"] if "definition" in one]
    assert len(asked) > 40
    for expression in asked:
        assert names_in(expression), expression
        plain = re.sub(r'="\$job"|=~"\$(?:instance|engine)"', '="any"', expression)
        assert list(problems_of(plain, known)) == []


def test_legends_name_labels_that_are_there(shipped: dict[str, Any], known: Known) -> None:
    for panel in panels(shipped):
        legends = [target["legendFormat"] for target in panel["targets"]]
        assert len(set(legends)) == len(legends), panel["title"]
        for target in panel["targets"]:
            (name, *_) = names_in(target["expr"])
            there = OF_THE_SCRAPE | known.labels[name].keys()
            if kept := re.search(r"by \(([^)]*)\)", target["expr"]):
                there &= {label.strip() for label in kept[1].split(",")}
            assert set(LEGEND.findall(target["legendFormat"])) <= there, target


def test_panels_have_units_and_a_place_of_their_own(shipped: dict[str, Any]) -> None:
    assert len({panel["id"] for panel in shipped["panels"]}) == len(shipped["panels"])
    for panel in panels(shipped):
        assert panel["fieldConfig"]["defaults"]["unit"]
    for one, other in combinations([panel["gridPos"] for panel in shipped["panels"]], 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y, (one, other)
        assert one["x"] + one["w"] <= 24


def test_it_has_the_groups_of_metrics_and_decisions_as_annotations(shipped: dict[str, Any]) -> None:
    titles = [panel["title"] for panel in shipped["panels"] if panel["type"] == "row"]
    assert titles == ["Load", "KV memory", "Latency and targets", "Decisions", "Inside the engine"]
    (annotation,) = shipped["annotations"]["list"]
    assert "autotune_decisions_total" in annotation["expr"]
    assert "unless" in annotation["expr"], "the first decision of a kind is one, too: its counter begins at 1"


def test_it_is_provisioned() -> None:
    (source,) = yaml.safe_load((FOLDER / "provisioning/datasources/kv-autotune.yml").read_text())["datasources"]
    assert source["type"] == "prometheus"
    (provider,) = yaml.safe_load((FOLDER / "provisioning/dashboards/kv-autotune.yml").read_text())["providers"]
    assert provider["type"] == "file"
    assert provider["options"]["path"]
