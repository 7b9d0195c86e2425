"""What people copy out of the pages works: commands parse with their options, YAML is taken, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from autotune.cli import app
from autotune.config import parse_config
from engine.arguments import parser
from policies.lint import lint
from policies.rules import parse_rules

ROOT = Path(__file__).parents[2]
PAGES = sorted({*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"} - {ROOT / "docs/LOG.md"})
GUIDES = [ROOT / "docs" / f"{name}.md" for name in ("quickstart", "tune", "train")]
VERBS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
ENGINE = parser("autotune engine")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(page: Path, *kinds: str) -> list[str]:
    """The fenced blocks of these kinds."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [text for kind, text in found if kind in kinds]


def command_lines(page: Path) -> Iterator[list[str]]:
    """Every command of the blocks, as words; of a session only what is typed."""
    for kind in ("sh", "console"):
        for text in blocks(page, kind):
            for line in text.replace("\\\n", " ").splitlines():
                if kind == "console" and not line.startswith("$ "):
                    continue
                words: list[str] = []
                for word in [*shlex.split(line.removeprefix("$ "), comments=True), "&&"]:
                    if word not in {"&&", "|", ";"}:
                        words.append(word)
                    elif words:
                        yield words
                        words = []


def parse(words: list[str]) -> None:
    """As the program would, up to the point where it begins. Raises for whatever it would refuse."""
    verb, *arguments = words[1:]
    command = VERBS[verb]
    if verb == "engine":
        ENGINE.parse_args(arguments)
        return
    if verb == "trace":
        verb, *arguments = arguments
        command = command.commands[verb]
    context = command.make_context(verb, arguments)
    if verb == "run":  # what it does not know is the engine's
        unknown = {word.partition("=")[0] for word in context.args if word.startswith("-")}
        assert unknown <= ENGINE._option_string_actions.keys(), unknown


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_is_one_that_the_program_takes(page: Path) -> None:
    for words in command_lines(page):
        if words[0].rpartition("/")[2] == "autotune":
            try:
                parse(words)
            except (Exception, SystemExit) as error:
                raise AssertionError(f"{shlex.join(words)}: {error!r}") from error
        elif words[0] == "make":
            for word in words[1:]:
                variable, is_set, _ = word.partition("=")
                known = rf"^{variable} \?=|\$\({variable}\)" if is_set else rf"^{word}:"
                assert re.search(known, MAKEFILE, re.MULTILINE), shlex.join(words)
                if words[1] == "run" and variable == "ARGS":
                    parse(["autotune", "run", *shlex.split(word.partition("=")[2])])


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_the_guides_have_commands(page: Path) -> None:
    assert len([words for words in command_lines(page) if "autotune" in words[0]]) > 8


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_in_the_text_exists_with_its_options(page: Path) -> None:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for text in re.findall(r"`autotune ([^`]+)`", prose):
        verb, *rest = text.replace("\\|", "|").split()
        if not verb[0].isalpha() or not verb.islower():
            continue  # COMMAND, and the like
        assert verb in VERBS, text
        commands = [VERBS[verb], *getattr(VERBS[verb], "commands", {}).values()]
        known = {name for one in commands for option in one.params for name in (*option.opts, *option.secondary_opts)}
        if verb in {"engine", "run"}:
            known |= ENGINE._option_string_actions.keys()
        named = {word.strip("[]()").partition("=")[0] for word in rest if word.lstrip("[(").startswith("-")}
        assert named <= known | {"--help"}, f"{name_of(page)}: {text}"


@pytest.mark.parametrize("page", GUIDES, ids=name_of)
def test_yaml_to_copy_is_taken(page: Path) -> None:
    for text in blocks(page, "yaml"):
        if text.startswith("version:"):
            assert lint(parse_rules(text)) == []
        else:
            parse_config(text)


def anchors(page: Path) -> set[str]:
    """Of the headings, as they are made of a heading's words."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_pages_agree_on_how_long_kernels_compile(page: Path) -> None:
    for sentence in re.split(r"(?<=[.:|])\s", " ".join(page.read_text(encoding="utf-8").split())):
        if re.search(r"kernels? .*(minute|seconds)", sentence) and "compil" in sentence and "first" in sentence:
            assert "a minute or two" in sentence, sentence


def test_the_readme_leads_to_the_first_steps_before_its_first_table() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.index("](docs/quickstart.md)") < text.index("|---|")
    assert "--against static:kv_format=int4" in text
