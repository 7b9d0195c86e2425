"""The built-in page over real HTTP: what it is made of, what it may do, and the data that it asks for."""

from __future__ import annotations

import json
import re
import urllib.error
import urllib.request
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib.resources import files
from typing import Any

import pytest

from autotune.admin_token import read_token
from autotune.dashboard.plots import COLUMNS

STATIC = {file.name: file.read_text() for file in (files("autotune.dashboard") / "static").iterdir()}


@pytest.fixture
def served(make_rig: Any) -> Iterator[Any]:
    rig = make_rig("admin: {port: 0}\n")
    rig.daemon.admin.start()
    yield rig
    rig.daemon.admin.stop()


def get(rig: Any, path: str) -> tuple[int, dict[str, str], str]:
    try:
        with urllib.request.urlopen(rig.daemon.admin.address + path, timeout=30) as answer:
            return answer.status, dict(answer.headers), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, dict(error.headers), error.read().decode()


def data(rig: Any, **known: Any) -> dict[str, Any]:
    query = "&".join(f"{name}={value}" for name, value in known.items())
    document: dict[str, Any] = json.loads(get(rig, f"/dashboard/data?{query}")[2])
    return document


class Tags(HTMLParser):
    """All tags with their attributes, and what they refer to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))


def test_every_file_is_served_with_a_policy_that_keeps_other_code_out(served: Any) -> None:
    kinds = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
    for name, text in STATIC.items():
        path = "/" if name == "index.html" else f"/dashboard/{name}"
        status, headers, body = get(served, path)
        assert (status, body) == (200, text), path
        assert headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "form-action 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
    assert len(STATIC) > 8


@pytest.mark.parametrize("name", ["nosuch.js", "..%2f..%2fadmin.py", "%2e%2e/routes.py", "__init__.py", "static"])
def test_nothing_else_is_served(served: Any, name: str) -> None:
    assert get(served, f"/dashboard/{name}")[0] == 404


def test_the_page_needs_nothing_from_elsewhere_and_holds_no_code_itself() -> None:
    for name, text in STATIC.items():
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name
        assert "@import" not in text
    for tag, attributes in Tags(STATIC["index.html"]).seen:
        assert not [key for key in attributes if key.startswith("on") or key == "style"], (tag, attributes)
        refers = attributes.get("src") or attributes.get("href") or ""
        assert not refers.startswith(("//", "data:", "javascript:")), refers
        if refers.startswith("dashboard/"):
            assert refers.removeprefix("dashboard/") in STATIC
        assert tag != "style"
        assert tag != "script" or attributes.get("src")


def test_what_comes_in_is_never_made_into_markup_or_code() -> None:
    code = "\n".join(text for name, text in STATIC.items() if name.endswith(".js"))
    for way in (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "DOMParser",
        "createContextualFragment", "setHTML", "srcdoc", "location =", "location.href", ".cookie", "localStorage",
    ):  # fmt: skip
        assert way not in code, way


def test_modules_import_what_is_there() -> None:
    for name, text in STATIC.items():
        for names, other in re.findall(r"import \{([^}]*)\} from \"\./([\w.]+)\"", text):
            assert other in STATIC, (name, other)
            for one in names.split(","):
                exported = rf"export (?:async )?(?:const|function|class) {one.strip()}\b"
                assert re.search(exported, STATIC[other]), (name, one, other)


def test_plots_are_of_columns_that_the_daemon_keeps() -> None:
    named = set(re.findall(r'column: "(\w+)"', STATIC["panels.js"]))
    assert len(named) > 10
    assert named <= set(COLUMNS)


def test_about_names_knobs_modes_and_formats(served: Any) -> None:
    about = json.loads(get(served, "/dashboard/about")[2])
    assert about["modes"] == ["active", "advise", "off"]
    assert about["knobs"]["block_size"]["values"] == [16, 32, 64, 128, 256]
    assert all(knob["can_be_set"] for knob in about["knobs"].values())
    assert list(about["formats"]) == ["native", "int8", "k8v4", "int4", "other"]
    assert set(about["formats"].values()) <= set(COLUMNS)


def test_a_page_gets_everything_once_and_then_what_is_new(served: Any) -> None:
    before = data(served)
    assert before["points"]["last"] == 0
    served.run_s(10)
    first = data(served)
    assert first["status"]["engine"] == "ok"
    assert first["status"]["model"] == "fake"
    assert "values" not in first["status"]
    assert first["points"]["last"] == len(first["points"]["t"]) >= 3
    assert set(first["points"]["columns"]) == set(COLUMNS)
    known = {"process": first["process"], "after": first["points"]["last"], "decisions": first["decisions"]["version"]}
    again = data(served, **known)
    assert again["points"]["t"] == []
    assert again["decisions"] == {"version": first["decisions"]["version"], "rows": None}
    served.engine.patch({"kv_format": "int8"}, writer="operator:anna", reason="<b>because</b>")
    served.run_s(7)
    newer = data(served, **known)
    assert newer["points"]["last"] > first["points"]["last"]
    (row,) = [one for one in newer["decisions"]["rows"] if one["scenario"] == "override"]
    assert row["reason"] == "<b>because</b>", "data, which the page makes text of"
    assert len(data(served, **{**known, "process": "another"})["points"]["t"]) == newer["points"]["last"]


@pytest.mark.parametrize("bad", ["after=-1", "after=x", "decisions=1.5", "after=" + "9" * 40, "after=", "after=%D9%A3"])
def test_numbers_that_are_none_are_refused(served: Any, bad: str) -> None:
    assert get(served, f"/dashboard/data?{bad}")[0] == 400


def test_the_data_do_not_hold_the_token(served: Any) -> None:
    served.run_s(3)
    secret = read_token(served.folder / "admin.token")
    for path in ("/", "/dashboard/about", "/dashboard/data", "/status", "/decisions", "/metrics"):
        assert secret not in get(served, path)[2], path
    code = STATIC["api.js"]
    assert "authorization: `Bearer ${token}`" in code
    assert code.count("token}") == 1, "the token goes into one header and nowhere else"


def test_predictions_and_measurements_come_along(served: Any) -> None:
    from autotune.decisions import DecisionRecord

    record = DecisionRecord(
        7, 1.5, "kv_format", "native", "int8", "rule", "why", "autotune", "applied", "", predicted={"ttft_tail_s": 0.4}
    )
    served.parts.decisions.append(record)
    first = data(served)
    assert first["decisions"]["rows"][0]["predicted"] == {"ttft_tail_s": 0.4}
    served.parts.decisions.set_effect(7, {"before": {"ttft_tail_s": 2.0}, "after": {"ttft_tail_s": 0.5}})
    known = {"process": first["process"], "decisions": first["decisions"]["version"]}
    assert data(served, **known)["decisions"]["rows"][0]["effect"]["after"] == {"ttft_tail_s": 0.5}
