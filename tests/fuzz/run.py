"""``make fuzz MINUTES=30``: schemathesis against the engine's, its control socket's and the daemon's HTTP, and random
files for everything that reads files. Ends with one line of JSON; exit code 1 when anything was found.

The engine is the real one on the bundled model. After every part: the same processes live, no log has a traceback, the
cache's books agree, the engine answers, and nobody without the token has changed the daemon.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import descriptions
from forward import Forward

from autotune.bench.context import Context
from autotune.bench.processes import resident_bytes
from autotune.bench.stand import Stand
from autotune.demo.run import bundled_model
from engine.clock import RealClock

# Of the time, in this order.
SHARES = {"openai": 0.4, "control": 0.2, "admin": 0.1, "files": 0.3}
MODEL_LEN = 256  # so that a request for very many tokens ends soon


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--parts", default=",".join(SHARES), help="of openai, control, admin, files")
    parser.add_argument("--folder", type=Path, help="logs and reports")
    parser.add_argument("--schemathesis", default="schemathesis", help="how to run it")
    given = parser.parse_args()
    parts = given.parts.split(",")
    program = Path(given.schemathesis)
    given.schemathesis = str(program.absolute()) if program.is_file() else given.schemathesis
    folder = given.folder or Path(tempfile.mkdtemp(prefix="kv-fuzz-"))
    whole = sum(SHARES[part] for part in parts)
    seconds = {part: 60 * given.minutes * SHARES[part] / whole for part in parts}
    found: dict[str, list[str]] = {}
    if set(parts) - {"files"}:
        found |= http(given, folder, {part: seconds[part] for part in parts if part != "files"})
    if "files" in parts:
        found["files"] = files(folder, seconds["files"], given.seed)
    document = {
        "fuzz": "kv-autotune",
        "minutes": given.minutes,
        "seed": given.seed,
        "found": found,
        "logs": str(folder),
    }
    print(json.dumps(document))
    return int(any(found.values()))


def http(given: argparse.Namespace, folder: Path, seconds: dict[str, float]) -> dict[str, list[str]]:
    context = Context(bundled_model(), folder, RealClock(), print)
    extra = ("--max-model-len", str(MODEL_LEN))
    found: dict[str, list[str]] = {}
    with (
        Stand(context, "stack", {}, pool_bytes=16 << 20, extra=extra) as stand,
        Forward(stand.stack.control) as control,
    ):
        urls = {
            "openai": stand.stack.url,
            "control": control.url,
            "admin": f"http://127.0.0.1:{stand.stack.admin_port}",
        }
        pids = (stand.engine.pid, stand.daemon.pid)
        before = [resident_bytes(pid) for pid in pids]
        for part, budget_s in seconds.items():
            description = folder / f"{part}.json"
            description.write_text(json.dumps(getattr(descriptions, part)()))
            command = [
                given.schemathesis, "run", str(description), "--url", urls[part], "--max-time",
                str(max(1, round(budget_s))), "--continue-on-failure", "--checks", "not_a_server_error",
                "--request-timeout", "60", "--suppress-health-check", "all", "--seed", str(given.seed), "--no-color",
            ]  # fmt: skip
            began_s = time.monotonic()
            with (folder / f"{part}.log").open("w") as log:
                code = subprocess.run(command, stdout=log, stderr=log, check=False, cwd=folder).returncode
            text = (folder / f"{part}.log").read_text(errors="replace")
            found[part] = [] if code == 0 else [f"schemathesis: exit code {code}, see {folder / part}.log"]
            found[part] += aftermath(stand, pids)
            tail = " | ".join(line.strip() for line in text.splitlines()[-14:] if line.strip())
            print(
                f"{part}: {time.monotonic() - began_s:.0f} s, {found[part] or 'nothing found'}; {tail[-500:]}",
                flush=True,
            )
        grown = [round((resident_bytes(pid) - old) / 1e6, 1) for pid, old in zip(pids, before, strict=True)]
        print(f"memory grew by {grown[0]} MB (engine) and {grown[1]} MB (daemon)", flush=True)
    return found


def aftermath(stand: Stand, pids: tuple[int, int]) -> list[str]:
    """What is not as it was."""
    problems: list[str] = []
    for child, pid in zip((stand.engine, stand.daemon), pids, strict=True):
        if not child.is_alive or child.pid != pid:
            problems.append(f"{child.name} has died: {child.last_words()}")
        if child.tracebacks():
            problems.append(f"{child.name}: {child.tracebacks()} tracebacks in its log")
    if problems:
        return problems
    audit = stand.control.audit()
    if audit["problem"] is not None:
        problems.append(f"the cache's books disagree: {audit['problem']}")
    status: dict[str, Any] = stand.status() or {}
    if (status.get("mode"), status.get("mode_by"), status.get("last_reload")) != ("active", "configuration", None):
        problems.append(f"somebody ordered the daemon about: {status}")
    if stand.get(f"{stand.stack.url}/health") is None:
        problems.append("the engine is not well")
    return problems


def files(folder: Path, budget_s: float, seed: int) -> list[str]:
    """The tests of this folder again and again, each time with another seed, until the time is over."""
    environment = {**os.environ, "FUZZ_EXAMPLES": "1000"}
    end_s, rounds = time.monotonic() + budget_s, 0
    while time.monotonic() < end_s:
        command = [
            sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", str(Path(__file__).parent), "-m", "",
            f"--hypothesis-seed={seed + rounds}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        (folder / "files.log").write_text(done.stdout + done.stderr)
        rounds += 1
        if done.returncode != 0:
            return [f"files, seed {seed + rounds - 1}: see {folder}/files.log: {done.stdout.strip().splitlines()[-1]}"]
    print(f"files: {rounds} rounds of 1000 examples a test, nothing found", flush=True)
    return []


if __name__ == "__main__":
    sys.exit(main())
