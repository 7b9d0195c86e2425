"""The command line: ``python -m autotune.evidence``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from autotune.evidence import __doc__ as description
from autotune.evidence.claims import CLAIMS, Claim
from autotune.evidence.finding import Finding, Verdict
from autotune.evidence.page import page
from autotune.evidence.sources import SOURCES, Inputs, Source
from engine.bench_frame import folder
from engine.machine_info import machine_info

Run = Callable[[list[str]], tuple[int, str]]
"""Runs a command; its exit code and the last line of its output."""


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m autotune.evidence",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = result.add_argument
    add("--text", type=folder, metavar="DIR", help="texts for quality; one of them must be held out from training")
    add("--traces", type=folder, metavar="DIR", help="request traces")
    add("--only", default="", metavar="C1,C5", help=f"of {', '.join(CLAIMS)}; the others stay as the folder has them")
    add("--folder", type=Path, default=Path("run/evidence"), metavar="DIR", help="what was measured (%(default)s)")
    add("--again", action="store_true", help="measure again what the folder has")
    add("--page", type=Path, metavar="FILE", help="write the page here, docs/evidence.md say")
    add("--quick", action="store_true", help="small loads, for a look: the figures are not to be quoted")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """0; 1 when a claim could not be measured; 2 for wrong usage. The last line on stdout is JSON."""
    arguments = parser().parse_args(argv)
    names = [name for name in arguments.only.split(",") if name] or [*CLAIMS]
    unknown = [name for name in names if name not in CLAIMS]
    if unknown:
        print(f"error: {unknown[0]} is no claim; choose from {', '.join(CLAIMS)}", file=sys.stderr)
        return 2
    inputs = Inputs(arguments.folder, arguments.text, arguments.traces, arguments.quick)
    try:
        arguments.folder.mkdir(parents=True, exist_ok=True)
        documents = measure([CLAIMS[name] for name in names], inputs, run, again=arguments.again)
        found = {name: claim.found(documents) for name, claim in CLAIMS.items()}
        if arguments.page is not None:
            date = time.strftime("%Y-%m-%d", time.gmtime())
            arguments.page.write_text(page(found, [*CLAIMS.values()], machine_info("cpu"), date), encoding="utf-8")
    except OSError as error:
        print(f"error: {error.filename or arguments.folder}: {error.strerror}", file=sys.stderr)
        return 1
    for name in names:
        print(f"{name:10} {found[name].verdict.value:12} {found[name].figures}")
    print(json.dumps({name: _as_json(found[name]) for name in names}))
    return int(any(found[name].verdict is Verdict.OPEN for name in names))


def measure(claims: Sequence[Claim], inputs: Inputs, run_one: Run, *, again: bool = False) -> dict[str, dict[str, Any]]:
    """The last line of every source that is in the folder or that the claims need; those are run if they are missing
    there, so that an interrupted run goes on. A source that fails leaves its claims open.
    """
    needed = list(dict.fromkeys(name for claim in claims for name in claim.sources))
    kind = "quick" if inputs.quick else "full"
    documents: dict[str, dict[str, Any]] = {}
    for name, source in SOURCES.items():
        path = inputs.folder / f"{name}.{kind}.json"
        if path.is_file() and not (again and name in needed):
            documents[name] = json.loads(path.read_text(encoding="utf-8"))
        elif name in needed:
            print(f"{name}: about {source.minutes:g} minutes: {source.shown()}", flush=True)
            document = _run(source, inputs, run_one)
            if document is not None:
                path.write_text(json.dumps(document), encoding="utf-8")
                documents[name] = document
    return documents


def _run(source: Source, inputs: Inputs, run_one: Run) -> dict[str, Any] | None:
    code, last = run_one(source.command(inputs))
    try:
        document = json.loads(last)
    except ValueError:
        document = None
    if not isinstance(document, dict):
        print(f"{source.name}: exit code {code} and no JSON at its end: {last[:200]}", file=sys.stderr)
        return None
    if code:
        print(f"{source.name}: exit code {code}; what it has is used", file=sys.stderr)
    return document


def run(command: list[str]) -> tuple[int, str]:
    """Show a command's output as it comes; its exit code and last line."""
    last = ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603  # our own modules
        for line in process.stdout or ():
            if last:
                print(f"  {last}", flush=True)
            last = line.rstrip("\n")
    return process.returncode, last


def _as_json(finding: Finding) -> dict[str, str]:
    return {"verdict": finding.verdict.value, "figures": finding.figures}


if __name__ == "__main__":
    sys.exit(main())
