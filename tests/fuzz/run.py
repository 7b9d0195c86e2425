"""``make fuzz MINUTES=30``: schemathesis against the engine's, its control socket's, the daemon's and the recording
proxy's HTTP, and random files and answers for everything that reads any. Ends with one line of JSON; exit code 1 when
anything was found.

The engine is the real one on the bundled model. After every part: the same processes live, no log has a traceback, the
cache's books agree, the engine answers, and nobody without the token has changed the daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import descriptions
from canned import Forward

from autotune.admin_token import read_token, token_beside
from autotune.bench.context import Context
from autotune.bench.processes import Child, resident_bytes
from autotune.bench.stand import Stand
from autotune.demo.bundled import bundled_model
from autotune.demo.stack import VERBS, free_port
from autotune.writers import OPERATOR_PREFIX
from engine.clock import RealClock
from envs.workload.loaders import load_trace
from envs.workload.trace import TraceError

# Of the time, in this order. The description of each part has its name, the proxy's is the engine's.
SHARES = {"openai": 0.3, "control": 0.15, "admin": 0.08, "orders": 0.07, "proxy": 0.1, "files": 0.3}
MODEL_LEN = 256  # so that a request for very many tokens ends soon


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", default=",".join(SHARES), help=f"of {', '.join(SHARES)}")
    parser.add_argument("--folder", type=Path, help="logs and reports")
    parser.add_argument("--schemathesis", default="schemathesis", help="how to run it")
    given = parser.parse_args()
    parts = given.parts.split(",")
    if unknown := set(parts) - set(SHARES):
        parser.error(f"--parts {','.join(sorted(unknown))}: choose from {', '.join(SHARES)}")
    program = Path(given.schemathesis)
    given.schemathesis = str(program.absolute()) if program.is_file() else given.schemathesis
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kv-fuzz-"))
    whole = sum(SHARES[part] for part in parts)
    seconds = {part: 60 * given.minutes * SHARES[part] / whole for part in parts}
    found: dict[str, list[str]] = {}
    rounds = None
    if set(parts) - {"files"}:
        found |= http(given, folder, {part: seconds[part] for part in parts if part != "files"})
    if "files" in parts:
        found["files"], rounds = files(folder, seconds["files"], given.seed)
    document = {
        "fuzz": "kv-autotune",
        "minutes": given.minutes,
        "seed": given.seed,
        "found": found,
        "operations": {part: len(operations(part)) for part in parts if part != "files"},
        "rounds_of_files": rounds,
        "logs": str(folder),
    }
    print(json.dumps(document))
    return int(any(found.values()))


def operations(part: str) -> list[tuple[str, str]]:
    """Methods and paths that a part tries."""
    paths = description_of(part)["paths"]
    return [(method, path) for path, methods in paths.items() for method in methods]


def description_of(part: str) -> dict[str, Any]:
    made: dict[str, Any] = getattr(descriptions, "openai" if part == "proxy" else part)()
    return made


@dataclass
class Watched:
    """What has to be as it was. ``ordered``: somebody with the token has changed the daemon meanwhile."""

    stand: Stand
    proxy: Child
    recording: Path
    proxy_url: str
    pids: Mapping[str, int] = field(default_factory=dict)
    ordered: bool = False

    @property
    def children(self) -> dict[str, Child]:
        return {"engine": self.stand.engine, "daemon": self.stand.daemon, "proxy": self.proxy}

    def problems(self) -> list[str]:
        """What is not as it was."""
        problems: list[str] = []
        for name, child in self.children.items():
            if not child.is_alive or child.pid != self.pids[name]:
                problems.append(f"{name} has died: {child.last_words()}")
            if child.tracebacks():
                problems.append(f"{name}: {child.tracebacks()} tracebacks in its log")
        if problems:
            return problems
        audit = self.stand.control.audit()
        if audit["problem"] is not None:
            problems.append(f"the cache's books disagree: {audit['problem']}")
        status: dict[str, Any] = self.stand.status() or {}
        told = (status.get("mode"), status.get("mode_by"), status.get("last_reload"))
        if not status or (not self.ordered and told != ("active", "configuration", None)):
            problems.append(f"somebody ordered the daemon about: {status}")
        urls = (self.stand.stack.url, self.proxy_url)
        return problems + [f"{url} is not well" for url in urls if self.stand.get(f"{url}/health") is None]


@contextlib.contextmanager
def watched(context: Context) -> Iterator[Watched]:
    """Engine, daemon and proxy, all serving."""
    extra, port = ("--max-model-len", str(MODEL_LEN)), free_port()
    with Stand(context, "stack", {}, pool_bytes=16 << 20, extra=extra) as stand:
        recording = stand.stack.folder / "traffic.csv"
        words = ("--target", stand.stack.url, "--record", str(recording), "--listen", f"127.0.0.1:{port}")
        proxy = Child("proxy", (*VERBS, "record-proxy", *words), stand.stack.folder / "proxy.log")
        made = Watched(stand, proxy, recording, f"http://127.0.0.1:{port}")
        try:
            proxy.start()
            stand.wait(lambda: stand.get(f"{made.proxy_url}/health") is not None, "the proxy", proxy)
            made.pids = {name: child.pid for name, child in made.children.items()}
            yield made
        finally:
            proxy.stop()


def http(given: argparse.Namespace, folder: Path, seconds: dict[str, float]) -> dict[str, list[str]]:
    context = Context(bundled_model(), folder, RealClock(), print)
    found: dict[str, list[str]] = {}
    with watched(context) as all_of_it, Forward(all_of_it.stand.stack.control) as control:
        stand = all_of_it.stand
        admin = f"http://127.0.0.1:{stand.stack.admin_port}"
        urls = {"openai": stand.stack.url, "control": control.url, "admin": admin, "orders": admin,
                "proxy": all_of_it.proxy_url}  # fmt: skip
        token = read_token(token_beside(stand.journal))
        before = {name: resident_bytes(pid) for name, pid in all_of_it.pids.items()}
        for part, budget_s in seconds.items():
            description = folder / f"{part}.json"
            description.write_text(json.dumps(description_of(part)))
            command = [
                given.schemathesis, "run", str(description), "--url", urls[part], "--max-time",
                str(max(1, round(budget_s))), "--continue-on-failure", "--checks", "not_a_server_error",
                "--request-timeout", "60", "--suppress-health-check", "all", "--seed", str(given.seed), "--no-color",
                *(["--header", f"Authorization: Bearer {token}"] if part == "orders" else []),
            ]  # fmt: skip
            began_s = time.monotonic()
            with (folder / f"{part}.log").open("w") as log:
                code = subprocess.run(command, stdout=log, stderr=log, check=False, cwd=folder).returncode
            text = (folder / f"{part}.log").read_text(errors="replace")
            all_of_it.ordered |= part == "orders"
            found[part] = [] if code == 0 else [f"schemathesis: exit code {code}, see {folder / part}.log"]
            found[part] += all_of_it.problems()
            if part == "orders" and not found[part] and not was_heard(stand):
                found[part].append("no order was carried out: all were refused at the door")
            tail = " | ".join(line.strip() for line in text.splitlines()[-14:] if line.strip())
            print(
                f"{part}: {time.monotonic() - began_s:.0f} s, {found[part] or 'nothing found'}; {tail[-500:]}",
                flush=True,
            )
        grown = {name: (resident_bytes(pid) - before[name]) / 1e6 for name, pid in all_of_it.pids.items()}
        print(f"memory grew by {', '.join(f'{more:.1f} MB ({name})' for name, more in grown.items())}", flush=True)
        recording = all_of_it.recording
    if "proxy" in found:
        found["proxy"] += recorded(recording)
    return found


def was_heard(stand: Stand) -> bool:
    """Whether somebody other than the daemon has written a knob, or given one back."""
    return any(OPERATOR_PREFIX in one["writer"] for one in stand.control.tunables()["writers"].values())


def recorded(path: Path) -> list[str]:
    """Whether what the proxy wrote is a trace, or holds nothing."""
    try:
        trace = load_trace(path)
    except TraceError as error:
        return [] if "no requests" in str(error) else [f"the recording is no trace: {error}"]
    print(f"{len(trace.requests)} requests were recorded", flush=True)
    return []


def files(folder: Path, budget_s: float, seed: int) -> tuple[list[str], int]:
    """The tests of this folder again and again, each time with another seed, until the time is over; and how often."""
    environment = {**os.environ, "FUZZ_EXAMPLES": "300"}
    end_s, rounds = time.monotonic() + budget_s, 0
    while (left_s := end_s - time.monotonic()) > 0:
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent), "-m", "",
            "--timeout", "0", f"--hypothesis-seed={seed + rounds}",
        ]  # fmt: skip
        with contextlib.suppress(subprocess.TimeoutExpired):
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, env=environment, timeout=left_s + 60
            )
            (folder / "files.log").write_text(done.stdout + done.stderr)
            if done.returncode != 0:
                last = (done.stdout.strip().splitlines() or ["nothing was said"])[-1]
                return [f"files, seed {seed + rounds}: see {folder}/files.log: {last}"], rounds
            rounds += 1
    if rounds == 0:
        return [f"files: not one whole round ended in {budget_s:.0f} s; give it more minutes"], 0
    print(f"files: {rounds} whole rounds with five times the usual examples, nothing found", flush=True)
    return [], rounds


if __name__ == "__main__":
    sys.exit(main())
