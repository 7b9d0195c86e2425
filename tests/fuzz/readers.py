"""Every reader of files that the product has, but for those of models, of journals, and of training, which needs more
installed.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import verdict_files
from policy_cards import card, tensors_of
from reader import JSON, LINES, YAML, Reader, file_with, safetensors_head, verb

from autotune.adapters.restart_file import FileRefused, put, read_own, render, values_in
from autotune.adapters.vllm import VLLM
from autotune.admin_token import TokenError, own_token
from autotune.config import Config, ConfigError, load_config
from autotune.reload import plan_reload
from autotune.wiring import check_rules, guard_of, policy_of, settings_of, watch_of
from engine.clock import ManualClock
from engine.errors import EngineError
from engine.quality.table import Model, QualityTable, Row, Scores, Source, read_table
from engine.quality.texts import read_text
from engine.recording import TrafficRecorder
from envs.metrics_fit import read_page
from envs.profile import ProfileError, read_profile
from envs.workload.loaders import load_trace, stream_trace
from envs.workload.trace import TraceError
from policies.auto import choose
from policies.card import CARD_FILE, WEIGHTS_FILE, PolicyFileError, read_policy
from policies.evaluation.cells import Score, Segment, Setup
from policies.evaluation.store import Store, StoreError
from policies.export import export_policy
from policies.profile_verdict import read_verdict
from policies.rules import RuleError, load_rules, preset_text, presets
from policies.threshold import ThresholdPolicy

ROOT: Final = Path(__file__).parents[2]
WHOLE: Final[dict[str, Any]] = json.loads(Config().model_dump_json()) | {
    "guard": {
        "allowed": {"kv_format": ["native", "int8"], "block_size": [16, 32]},
        "knob_dwell_s": {"kv_format": 3.0},
        "effects": {"canary": ["kv_format"]},
    },
    "policy": {"use": "rules", "rules": "default", "quality_budget": 0.01},
}
_TEXT: Final = "It is a truth universally acknowledged, that 42 men must be in want of 7 wives.\n" * 3
_AZURE: Final = "TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(
    f"2023-11-16 18:17:0{n}.9799600,{100 + n},{10 + n}\n" for n in range(5)
)
_PLAIN: Final = "arrival_s,prompt_tokens,output_tokens,finish,estimated,hash_ids_b16\n" + "".join(
    f"{n}.5,{32 + n},{4 + n},stop,,1 2\n" for n in range(5)
)
_PAGE: Final = '# TYPE vllm:a counter\nvllm:a_total{engine="0"} 5\nvllm:b_bucket{le="+Inf"} 3\nvllm:b_sum 1.5\n'
_MOONCAKE: Final = "".join(
    json.dumps({"timestamp": 100 * n, "input_length": 600 + n, "output_length": 5 + n, "hash_ids": [1, 2]}) + "\n"
    for n in range(4)
)


def start(path: Path) -> None:
    """As a daemon starts with it, short of a process."""
    config = load_config(path)
    rules = check_rules(config)
    policy_of(config, rules, or_rules=True)
    guard_of(config)
    watch_of(config)
    settings_of(config)
    plan_reload(Config(), config)


def _rules(path: Path) -> None:
    verb("lint-rules", str(path))
    load_rules(path)


def _policy(folder: Path) -> Path:
    made = card()
    export_policy(folder, made, tensors_of(made.network))
    return folder


def _weights(path: Path) -> None:
    """The card's sum of them is right, so that they are read."""
    place = path.with_name(CARD_FILE)
    document = json.loads(place.read_text()) | {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    place.write_text(json.dumps(document))
    read_policy(path.parent)


def _verdict(path: Path) -> None:
    """Whoever chooses by one never raises, and says what it made of it in lines."""
    rules = ThresholdPolicy(load_rules("default"))
    for budget in (0.005, 1.0):
        chosen = choose(path.parents[1], rules, profile_digest=verdict_files.DIGEST, quality_budget=budget)
        assert not any("\n" in line for line in chosen.choice.lines())
    read_verdict(path)


def _profile(path: Path) -> None:
    read_profile(path).describe()


def _trace(path: Path) -> None:
    verb("trace", "inspect", str(path))
    load_trace(path, skip_bad_lines=True, rate_rps=1.0)
    list(stream_trace(path))


def _table(path: Path) -> None:
    table = read_table(path)
    for name in ("native", "int8"):
        table.row_of_format(name)


def _quality_table(folder: Path) -> Path:
    scores = Scores(tokens=10, perplexity=5, increase_pct=1.0, increase_error_pct=0, kl=0.01, top1=0.95)
    source = Source(after_prompt=scores, by_position=[scores, None])
    rows = {
        name: Row(
            values={} if name == "native" else {"kv_format": name}, bits_per_element=8.0, decode_tokens_per_s=None,
            generated=source, text=None, probes=None,
        )
        for name in ("native", "int8")
    }  # fmt: skip
    table = QualityTable(
        model=Model(name="tiny", sha256="0" * 64, dtype="float32"), created="now", machine={"device": "cpu"},
        conditions={"tokens": 20}, settings=rows,
    )  # fmt: skip
    return file_with("quality.json", table.model_dump_json())(folder)


def _drop_in(folder: Path) -> Path:
    path = folder / "engine.conf"
    put(path, render("drop_in", {VLLM.flags["kv-cache-dtype"]: "fp8"}, {"kv-cache-dtype": "fp8", "block-size": 16}))
    return path


def _own_file(path: Path) -> None:
    values = values_in(read_own(path))
    for knob in set(VLLM.tunables) & set(values):
        try:
            VLLM.tunables[knob].parse(values[knob])
        except ValueError:
            continue


def _recording(path: Path) -> None:
    for earlier in path.parent.glob(f"{path.name}.*"):
        earlier.unlink()
    TrafficRecorder(path, ManualClock()).close()


def _cells(folder: Path) -> Path:
    segment = Segment(**dict.fromkeys(Segment.__dataclass_fields__, 0))
    score = Score(**dict.fromkeys(Score.__dataclass_fields__, 0) | {"segments": (segment,)})
    row = {"key": "a", "score": score.to_json()}
    return file_with("cells.jsonl", f"{json.dumps(row)}\n{json.dumps(row)}\n")(folder)


def _store(path: Path) -> None:
    path.with_name("setup.json").unlink(missing_ok=True)
    Store(path.parent, cast("Setup", SimpleNamespace(fingerprint=dict)))


def _token(folder: Path) -> Path:
    own_token(folder / "admin.token", make=True)
    return folder / "admin.token"


def _fleet_token(path: Path) -> None:
    assert verb("fleet", "--prometheus", "http://127.0.0.1:9", "--token-file", str(path)) == 1


READERS: Final = (
    Reader("configuration", file_with("daemon.yaml", json.dumps(WHOLE)), start, (ConfigError,), YAML),
    Reader("configuration, checked", file_with("daemon.yaml", json.dumps(WHOLE)),
           lambda at: verb("check-config", str(at)), (), YAML, examples=5),
    *(
        Reader(f"rules {name}", file_with("rules.yaml", preset_text(name)), _rules, (RuleError,), YAML)
        for name in presets()
    ),
    Reader("card", lambda to: _policy(to) / CARD_FILE, lambda at: read_policy(at.parent, profile_digest="0" * 64),
           (PolicyFileError,), JSON),
    Reader("verdict on a profile", lambda to: verdict_files.put(to, verdict_files.verdict()), _verdict,
           (PolicyFileError,), JSON),
    Reader("weights of a policy", lambda to: _policy(to) / WEIGHTS_FILE, _weights, (PolicyFileError,),
           head=safetensors_head),
    Reader("page that a profile is fitted to", file_with("page.prom", _PAGE),
           lambda at: read_page(at.read_bytes().decode("utf-8", "replace")), (ValueError,)),
    Reader("profile", file_with("p.yaml", (ROOT / "envs/profiles/bundled_cpu.yaml").read_text()), _profile,
           (ProfileError,), YAML),
    Reader("token", _token, lambda at: own_token(at, make=True),
           (TokenError,)),
    Reader("token for Prometheus", file_with("token", "0123456789abcdef"), _fleet_token, ()),
    Reader("trace, Azure's form", file_with("azure.csv", _AZURE), _trace, (TraceError,), examples=30),
    Reader("trace, plain form", file_with("plain.csv", _PLAIN), _trace, (TraceError,), examples=30),
    Reader("trace, packed", file_with("plain.csv.gz", gzip.compress(_PLAIN.encode())), _trace, (TraceError,),
           examples=30),
    Reader("trace, Mooncake's form", file_with("mooncake.jsonl", _MOONCAKE), _trace, (TraceError,), LINES,
           examples=30),
    Reader("quality table", _quality_table, _table, (EngineError,), JSON),
    Reader("restart drop-in", _drop_in, _own_file, (FileRefused,)),
    Reader("text", file_with("a.txt", _TEXT), read_text, (EngineError,)),
    Reader("text, packed", file_with("a.txt.gz", gzip.compress(_TEXT.encode())), read_text, (EngineError,)),
    Reader("recording", file_with("traffic.csv", _PLAIN), _recording, (EngineError,)),
    Reader("results of an evaluation", _cells, _store, (StoreError, ValueError), LINES),
)  # fmt: skip
