"""``autotune compare-formats``: files, verdicts, and mistakes that end in one line before anything is measured."""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from autotune.cli import app
from autotune.cli._shared import fail_with
from autotune.quality_view import about_probes
from engine.quality.table import Probes, Scores

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 300,
}
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def autotune(capsys: pytest.CaptureFixture[str]) -> Command:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = fail_with(lambda: app(["compare-formats", *arguments], standalone_mode=False))
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    from engine.models.random_model import write_random_model

    return str(write_random_model(tmp_path_factory.mktemp("formats") / "tiny", CONFIG, seed=1, deviation=0.3))


@dataclass(frozen=True)
class Measured:
    """What one measurement wrote; it takes many times as long as all else here."""

    code: int
    out: str
    err: str
    folder: Path


@pytest.fixture(scope="module")
def measured(model: str, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """With a plot asked for, where there is no matplotlib."""
    folder, out, err = tmp_path_factory.mktemp("measured") / "made", io.StringIO(), io.StringIO()
    find = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patched, redirect_stdout(out), redirect_stderr(err):
        patched.setattr(
            importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
        )
        options = ["--quick", "-o", str(folder), "--csv", "--plot", "--quality-budget", "0", "--min-agreement", "1"]
        code = fail_with(lambda: app(["compare-formats", model, *options], standalone_mode=False))
    return Measured(code, out.getvalue(), err.getvalue(), folder)


def test_table_csv_and_verdict(measured: Measured) -> None:
    out = measured.out
    assert measured.code == 0, measured.err
    assert "tiny: cost of KV formats and eviction, budget 0 %" in out
    document = json.loads((measured.folder / "quality.json").read_text())
    rows = list(csv.DictReader((measured.folder / "quality.csv").open()))
    assert [row["setting"] for row in rows] == list(document["settings"])
    by_name = {row["setting"]: row for row in rows}
    assert by_name["native"]["verdict"] == "ok"
    assert by_name["int4"]["verdict"].startswith(("perplexity", "top-1"))
    assert float(by_name["int4"]["generated_kl"]) == document["settings"]["int4"]["generated"]["after_prompt"]["kl"] > 0
    assert by_name["int4"]["text_kl"] == by_name["int4"]["passkeys"] == ""  # neither text nor tokenizer here
    lines = [line.split() for line in out.splitlines() if "±" in line]
    assert [" ".join(line[: 2 if "_" in line[0] or line[0] == "window" else 1]) for line in lines] == list(by_name)
    assert [line[-1] == "ok" for line in lines] == [row["verdict"] == "ok" for row in rows]
    assert "…" not in out  # nothing is cut off at 80 columns


def mistakes(model: str, folder: Path) -> list[tuple[list[str], str]]:
    (folder / "file").write_text("words")
    (folder / "blank").write_text(" \n")
    (folder / "bytes").write_bytes(bytes(range(128, 256)))
    (folder / "texts").mkdir()
    (folder / "texts" / "novel.txt").write_text("words")
    (folder / "empty").mkdir()
    return [
        (["/nowhere"], "model folder /nowhere does not exist"),
        ([model, "--text", "/nowhere"], "/nowhere: no such file or folder"),
        ([model, "--text", str(folder / "empty")], "holds no text (.txt or .txt.gz)"),
        ([model, "--text", str(folder / "blank")], "there is no text in it"),
        ([model, "--text", str(folder / "bytes")], "that is no UTF-8 text"),
        ([model, "--text", str(folder / "texts"), "--held-out", "poem"], "begins with 'poem'; there are novel.txt"),
        ([model, "--text", str(folder / "file")], "holds no tokenizer.json, so --text cannot be read"),
        ([model, "-o", str(folder / "file" / "below")], "the folder cannot be made: "),
        ([model, "--device", "tpu"], "device 'tpu'"),
        ([model, "--quality-budget", "-1"], "--quality-budget"),
        ([], "Missing argument"),
    ]


@pytest.mark.parametrize("number", range(11))
def test_mistakes_are_one_line(autotune: Command, model: str, tmp_path: Path, number: int) -> None:
    arguments, message = mistakes(model, tmp_path)[number]
    code, _, err = autotune(*arguments)
    assert code in {1, 2}
    assert message in err
    assert [line for line in err.splitlines() if line.strip()] == [err.strip()]


def test_a_missing_matplotlib_costs_the_plot_only(measured: Measured) -> None:
    assert measured.code == 0
    assert measured.err.startswith(
        "the plot needs matplotlib (pip install 'kv-autotune[plots]'): measuring without it\n"
    )
    assert sorted(file.name for file in measured.folder.iterdir()) == ["quality.csv", "quality.json"]


def test_a_mistake_leaves_no_folder(autotune: Command, tmp_path: Path) -> None:
    assert autotune("/nowhere", "-o", str(tmp_path / "made"))[0] == 1
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("right", "number", "said"),
    [
        (16, 16, ""),
        (14, 16, "14 of 16 passkeys: too few probes to judge"),
        (13, 16, "too few probes to judge"),
        (5, 16, "does not retrieve well enough"),
        (59, 64, ""),
        (40, 64, "does not retrieve well enough"),
    ],
)
def test_retrieval_is_judged_as_far_as_the_probes_allow(right: int, number: int, said: str) -> None:
    scores = Scores(tokens=1, perplexity=1, increase_pct=0, increase_error_pct=0, kl=0, top1=1)
    notes = about_probes(Probes(n=number, accuracy=right / number, answers=scores))
    assert said in " ".join(notes)
    assert bool(notes) == bool(said)


def test_help_names_the_options(autotune: Command) -> None:
    code, out, _ = autotune("--help")
    assert code == 0
    for option in ("--text", "--out", "--csv", "--plot", "--quick", "--quality-budget"):
        assert option in out
