"""Starting and stopping a real engine process, and what is said when it cannot start."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from engine.arguments import options_from, parser
from engine.control_client import ControlClient
from engine.errors import EXIT_CONFIGURATION, EngineError
from engine.options import EngineOptions
from engine.serve import bind_tcp, main
from engine.sizes import format_size, parse_size
from engine.tunables import TUNABLES


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64M", 64 << 20),
        ("64MiB", 64 << 20),
        ("64MB", 64_000_000),
        ("1.5g", 3 << 29),
        ("4096", 4096),
        (7, 7),
        ("2 KB", 2000),
    ],
)
def test_sizes(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "M", "-1", "0", "12X", "1e9", "nan", "9" * 400])
def test_no_sizes(text: str) -> None:
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_sizes_are_shown_in_binary_units() -> None:
    assert [format_size(size) for size in (5, 2048, 64 << 20, 3 << 40)] == ["5 B", "2.0 KiB", "64.0 MiB", "3.0 TiB"]


def test_command_line_becomes_options(tmp_path: Path) -> None:
    line = ["--model", str(tmp_path), "--port", "0", "--kv-pool-bytes", "64M"]
    line += ["--set", "kv_format=int8", "--control-uid", "7"]
    options = options_from(parser().parse_args([*line, "--protect-layers", "2"]))
    assert options.protect_layers == 2
    assert options.kv_pool_bytes == 64 << 20
    assert options.initial_values()["kv_format"] == "int8"
    assert options.control_uids == (7,)
    assert options.host_pool_bytes == 0
    line += ["--host-pool-bytes", "1G", "--host-link-bytes-per-s", "500MB"]
    options = options_from(parser().parse_args(line))
    assert (options.host_pool_bytes, options.host_link_bytes_per_s) == (1 << 30, 500_000_000)
    with pytest.raises(EngineError, match="KNOB=VALUE"):
        options_from(parser().parse_args([*line, "--set", "kv_format"]))
    with pytest.raises(EngineError, match="native, int8, k8v4, int4"):
        EngineOptions(model=tmp_path, tunables={"kv_format": "int3"}).initial_values()


def test_help_says_what_a_knob_may_be_set_to() -> None:
    text = parser().format_help()
    for tunable in TUNABLES.values():
        assert f"{tunable.name}={'|'.join(map(str, tunable.values))}" in text


def fails(capsys: pytest.CaptureFixture[str], arguments: list[str], code: int = 1) -> str:
    assert main(arguments) == code
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1
    return lines[0]


def test_port_in_use(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    with bind_tcp("127.0.0.1", 0) as taken:
        port = str(taken.getsockname()[1])
        line = fails(capsys, ["--model", str(tiny), "--port", port, "--control", str(tmp_path / "c.sock")])
    assert f"127.0.0.1:{port}" in line
    assert "--port" in line
    assert not (tmp_path / "c.sock").exists()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--host", "no.such.host.invalid"], "cannot listen"),
        (["--port", "99999"], "cannot listen"),
        (["--host", "x" * 300], "cannot listen"),
        (["--control", "/tmp/" + "x" * 120], "shorter"),
        (["--host-pool-bytes", "1"], " bytes with --host-pool-bytes"),
        (["--kv-pool-bytes", "1"], " bytes with --kv-pool-bytes"),
    ],
)
def test_one_line_for_what_cannot_be_done_here(
    capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path, arguments: list[str], hint: str
) -> None:
    common = ["--model", str(tiny), "--port", "0", "--control", str(tmp_path / "c.sock")]
    assert hint in fails(capsys, [*common, *arguments])
    assert not (tmp_path / "c.sock").exists()


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--set", "block_size=48"], "16, 32, 64, 128, 256"),
        (["--set", "page=1"], "unknown tunable"),
        (["--set", "block_size"], "KNOB=VALUE"),
        (["--quality-table", "/no/such/table"], "cannot be read"),
        (["--model", "no/such/folder"], "does not exist"),
        (["--threads", "0"], "--threads"),
        (["--threads", "100000"], "1024"),
        (["--threads", "9" * 400], "--threads 9999"),
        (["--max-waiting", "0"], "at least 1"),
        (["--max-waiting", "-" + "9" * 400], "at least 1"),
        (["--recode-budget", "-1"], "at least 0"),
        (["--prefix-pin-share", "1.5"], "0 to 1"),
        (["--grace", "-1"], "--grace"),
        (["--grace", "nan"], "--grace nan"),
        (["--grace", "inf"], "86400"),
        (["--recent-tokens", "-64"], "multiple of 16"),
        (["--recent-tokens", "50"], "multiple of 16"),
    ],
)
def test_one_line_for_what_is_wrong(
    capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path, arguments: list[str], hint: str
) -> None:
    """A code of its own, by which a supervisor knows that starting again cannot help."""
    common = ["--model", str(tiny), "--port", "0", "--control", str(tmp_path / "c.sock")]
    assert hint in fails(capsys, [*common, *arguments], EXIT_CONFIGURATION)
    assert not (tmp_path / "c.sock").exists()


def test_only_the_model_needs_torch() -> None:
    """The daemon and the command line import these; the engine's bookkeeping runs in simulators."""
    modules = "engine.core, engine.core_thread, engine.serve, engine.server.app, engine.server.run"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    code = "import sys, engine.control_client; sys.exit(bool({'torch', 'numba', 'uvicorn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama of two layers with a byte tokenizer, as transformers would save it."""
    transformers = pytest.importorskip("transformers")
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    from engine.token_bytes import byte_alphabet

    folder = tmp_path_factory.mktemp("models") / "tiny"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=0,
        bos_token_id=1,
    )
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_real_engine_serves_and_stops_cleanly(tiny: Path, tmp_path: Path, number: signal.Signals) -> None:
    control = tmp_path / "c.sock"
    command = [sys.executable, "-m", "engine.serve", "--model", str(tiny), "--port", "0", "--control", str(control)]
    command += ["--kv-pool-bytes", "8M", "--grace", "0.2", "--dtype", "float32"]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if "http://" in line:
                break
        found = re.search(r"http://\S+?(?=,)", lines[-1])
        assert found, lines
        url = found[0]
        body = {"prompt": "hello", "max_tokens": 5, "ignore_eos": True, "temperature": 0}
        answer = httpx.post(url + "/v1/completions", json=body, trust_env=False, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 5
        with ControlClient(control) as client:
            assert client.patch({"kv_format": "int8"}, writer="test")["results"]["kv_format"]["status"] in {
                "applied",
                "converging",
            }
        endless = {**body, "prompt": "x", "max_tokens": 400, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=endless, trust_env=False, timeout=60) as stream:
            received = stream.iter_lines()
            next(received)
            process.send_signal(number)
            rest = [line for line in received if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(15) == 0
        assert process.stderr.read() == ""
    assert not control.exists()
    port = int(url.rsplit(":", 1)[1])
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0
