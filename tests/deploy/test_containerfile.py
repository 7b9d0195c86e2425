"""The container file: what it copies is there, both images run without root, and what they start exists."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from autotune.config import parse_config
from engine.arguments import options_from, parser

ROOT = Path(__file__).parents[2]
LINES = re.sub(r"\\\n", " ", (ROOT / "deploy/container/Containerfile").read_text()).splitlines()
INSTRUCTIONS = [line.split(maxsplit=1) for line in LINES if line.strip() and not line.startswith("#")]


def stage(name: str) -> list[tuple[str, str]]:
    """The instructions of a stage and of those that it is built on, in order."""
    stages: dict[str, list[tuple[str, str]]] = {}
    current: list[tuple[str, str]] = []
    for word, rest in INSTRUCTIONS:
        if word == "FROM":
            base, _, own = rest.partition(" AS ")
            current = stages.setdefault(own, list(stages.get(base, [])))
        current.append((word, rest))
    return stages[name]


@pytest.mark.parametrize("name", ["daemon", "engine"])
def test_images_run_without_root(name: str) -> None:
    users = [rest for word, rest in stage(name) if word == "USER"]
    assert users
    assert users[-1] == "65532:65532"
    last_user = max(index for index, (word, _) in enumerate(stage(name)) if word == "USER")
    assert not any(word == "RUN" for word, _ in stage(name)[last_user:])


def test_what_is_copied_is_there_and_not_ignored() -> None:
    kept = {line.removeprefix("!") for line in (ROOT / ".containerignore").read_text().splitlines() if line[:1] == "!"}
    copied = [rest.split()[:-1] for word, rest in INSTRUCTIONS if word == "COPY" and not rest.startswith("--from")]
    names = {name for names in copied for name in names}
    assert {"pyproject.toml", "constraints.txt", "autotune", "systemd/autotune.yaml"} <= names
    for name in names:
        assert (ROOT / name).exists(), name
        assert name.split("/")[0] in kept, name


def test_what_is_started_exists() -> None:
    daemon = json.loads(dict(stage("daemon"))["CMD"])
    assert daemon[0] == "daemon"
    parse_config((ROOT / "systemd/autotune.yaml").read_text())
    words = json.loads(dict(stage("engine"))["CMD"])
    assert words[0] == "engine"
    options = options_from(parser().parse_args(words[1:]))
    assert (str(options.model), options.host) == ("/models/model", "0.0.0.0")
