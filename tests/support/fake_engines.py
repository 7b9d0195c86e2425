"""Engines of other makes as they look over HTTP: a page that grows as requests are served, and what else is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

_VLLM_TTFT = (0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0)
_VLLM_ITL = (0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)
_LENGTHS = (10.0, 50.0, 100.0, 200.0, 500.0, 1000.0)


@dataclass
class Figures:
    """What one engine has done since its start."""

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    completed: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    started: float = 1.78e9

    def serve(self, number: int, *, ttft_s: float = 0.2, gap_s: float = 0.02, tokens: int = 16) -> None:
        """So many requests of 128 tokens came, were answered and are gone."""
        self.completed += number
        self.prompt_tokens += 128 * number
        self.generation_tokens += tokens * number
        self.ttft += [ttft_s] * number
        self.gaps += [gap_s] * (number * (tokens - 1))


class FakeServer:
    """Serves ``kind`` on a free port of loopback; ``knobs`` are its settings. Use in ``with``.

    ``alive`` False: every answer is 503, as of a server that loads. :attr:`posts` are the paths that were POSTed to;
    ``before_page`` is called whenever the metrics page is asked for.
    """

    def __init__(self, kind: str, knobs: Mapping[str, Any], engines: Sequence[str] = ("0",)) -> None:
        self.kind, self.knobs = kind, dict(knobs)
        self.engines = {label: Figures() for label in engines}
        self.alive = True
        self.posts: list[str] = []
        self.page: str | None = None
        self.has_pause = True
        self.before_page: Callable[[], None] = lambda: None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*outer.answer(self.path))

            def do_POST(self) -> None:
                outer.posts.append(self.path)
                known = outer.has_pause and self.path.partition("?")[0] in {"/pause", "/resume"}
                self._answer(*((200, "{}") if known else (404, "")))

            def _answer(self, status: int, body: str) -> None:
                data = body.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"

    @property
    def figures(self) -> Figures:
        return next(iter(self.engines.values()))

    def restart(self, **knobs: Any) -> None:
        """Another run: counters begin again, with other settings perhaps."""
        self.knobs.update(knobs)
        self.engines = {label: Figures(started=one.started + 100) for label, one in self.engines.items()}

    def answer(self, path: str) -> tuple[int, str]:
        if not self.alive:
            return 503, "loading"
        if path == "/metrics":
            self.before_page()
            return 200, PAGES[self.kind](self) if self.page is None else self.page
        if path == "/health":
            return 200, ""
        told = TOLD[self.kind](self).get(path)
        return (404, "") if told is None else (200, json.dumps(told))

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()


def histogram(name: str, bounds: Sequence[float], values: Sequence[float], labels: str) -> list[str]:
    """A histogram's lines."""
    lines = [f"# TYPE {name} histogram"]
    for bound in (*bounds, float("inf")):
        text = "+Inf" if bound == float("inf") else f"{bound}"
        lines.append(f'{name}_bucket{{le="{text}",{labels}}} {sum(value <= bound for value in values)}')
    return [*lines, f"{name}_count{{{labels}}} {len(values)}", f"{name}_sum{{{labels}}} {sum(values)}"]


def _sample(name: str, kind: str, labels: str, value: float) -> list[str]:
    return [f"# TYPE {name} {kind}", f"{name}{{{labels}}} {value}"]


def _vllm(server: FakeServer) -> str:
    lines = ["# TYPE process_start_time_seconds gauge", f"process_start_time_seconds {server.figures.started}"]
    for label, one in server.engines.items():
        labels = f'engine="{label}",model_name="tiny"'
        lines += _sample("vllm:num_requests_running", "gauge", labels, one.running)
        lines += _sample("vllm:num_requests_waiting", "gauge", labels, one.waiting)
        lines += _sample("vllm:kv_cache_usage_perc", "gauge", labels, one.usage)
        lines += _sample("vllm:prompt_tokens_total", "counter", labels, one.prompt_tokens)
        lines += _sample("vllm:generation_tokens_total", "counter", labels, one.generation_tokens)
        lines += _sample("vllm:num_preemptions_total", "counter", labels, one.preemptions)
        lines += _sample("vllm:request_success_total", "counter", f'finished_reason="stop",{labels}', one.completed)
        lines += histogram("vllm:time_to_first_token_seconds", _VLLM_TTFT, one.ttft, labels)
        lines += histogram("vllm:inter_token_latency_seconds", _VLLM_ITL, one.gaps, labels)
        lines += histogram("vllm:request_prompt_tokens", _LENGTHS, [128] * one.completed, labels)
        lines += histogram("vllm:request_generation_tokens", _LENGTHS, [16] * one.completed, labels)
        knobs = f'block_size="{server.knobs["block-size"]}",cache_dtype="{server.knobs["kv-cache-dtype"]}"'
        lines += _sample("vllm:cache_config_info", "gauge", f'{knobs},engine="{label}",num_gpu_blocks="100"', 1)
    return "\n".join(lines) + "\n"


def _sglang(server: FakeServer) -> str:
    lines: list[str] = []
    for rank, one in server.engines.items():
        dp = f',dp_rank="{rank}"' if len(server.engines) > 1 else ""
        labels = f'model_name="m",tp_rank="0",pp_rank="0"{dp}'
        lines += _sample("sglang:num_running_reqs", "gauge", labels, one.running)
        lines += _sample("sglang:num_queue_reqs", "gauge", labels, one.waiting)
        lines += _sample("sglang:token_usage", "gauge", labels, one.usage)
        lines += _sample("sglang:num_retracted_requests_total", "counter", labels, one.preemptions)
    one = server.figures
    streamed = 'model_name="m",is_streaming="true"'
    lines += _sample("sglang:prompt_tokens_total", "counter", streamed, one.prompt_tokens)
    lines += _sample("sglang:generation_tokens_total", "counter", streamed, one.generation_tokens)
    lines += _sample("sglang:num_requests_total", "counter", streamed, one.completed)
    lines += histogram("sglang:time_to_first_token_seconds", _VLLM_TTFT, one.ttft, streamed)
    lines += histogram("sglang:inter_token_latency_seconds", _VLLM_ITL, one.gaps, 'model_name="m"')
    return "\n".join(lines) + "\n"


def _llamacpp(server: FakeServer) -> str:
    one = server.figures
    figures = {
        "prompt_tokens_total counter": one.prompt_tokens,
        "tokens_predicted_total counter": one.generation_tokens,
        "tokens_predicted_seconds_total counter": sum(one.gaps),
        "n_decode_total counter": one.generation_tokens,
        "requests_processing gauge": one.running,
        "requests_deferred gauge": one.waiting,
    }
    lines = []
    for name, value in figures.items():
        lines += [f"# TYPE llamacpp:{name}", f"llamacpp:{name.partition(' ')[0]} {value}"]
    return "\n".join(lines) + "\n"


PAGES = {"vllm": _vllm, "sglang": _sglang, "llamacpp": _llamacpp}
TOLD: dict[str, Any] = {
    "vllm": lambda _: {"/version": {"version": "0.32.0"}},
    "sglang": lambda server: {
        "/get_server_info": {
            "version": "0.5.23",
            "kv_cache_dtype": server.knobs["kv-cache-dtype"],
            "page_size": server.knobs["page-size"],
            "max_running_requests": 64,
            "served_model_name": "m",
        }
    },
    "llamacpp": lambda server: {
        "/props": {
            "total_slots": server.knobs["parallel"],
            "default_generation_settings": {"n_ctx": 512},
            "model_path": "/models/tiny.gguf",
            "build_info": "b11434-sdist",
        }
    },
}
KNOBS: dict[str, dict[str, Any]] = {
    "vllm": {"kv-cache-dtype": "auto", "block-size": 16},
    "sglang": {"kv-cache-dtype": "auto", "page-size": 1},
    "llamacpp": {"parallel": 4},
}
