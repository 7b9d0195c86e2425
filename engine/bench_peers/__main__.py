"""The command line of the comparison."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engine.bench.client import prompts
from engine.bench.shapes import REFERENCE, make_model
from engine.bench_peers import __doc__ as description
from engine.bench_peers.install import PeerError
from engine.bench_peers.peers import PEERS, Side, ours
from engine.machine_info import machine_info

_PROMPT, _OUTPUT = 128, 64


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(prog="python -m engine.bench_peers", description=description)
    add = result.add_argument
    add("--peers", default=",".join(PEERS), metavar="A,B", help="of %(default)s")
    add("--concurrency", default="1,8,32", metavar="N,M", help="requests at a time (%(default)s)")
    add("--rounds", type=int, default=5, help="loops of each side per concurrency (%(default)s)")
    add("--waves", type=int, default=4, help="requests per loop, times the concurrency (%(default)s)")
    add("--processors", default="0,1", metavar="N,M", help="who may run on which (%(default)s)")
    add("--work", type=Path, default=Path("run/peers"), metavar="DIR", help="environments and models (%(default)s)")
    add("--options", default="", metavar="TEXT", help="of our engine, in one argument")
    add("--quick", action="store_true", help="one short loop each: shows that it works, measures nothing")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """0, or 1 when a peer could not be measured. Progress goes to stdout too; its last line is JSON."""
    arguments = parser().parse_args(argv)
    os.sched_setaffinity(0, {int(number) for number in arguments.processors.split(",")})
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    model = make_model(work / "model", REFERENCE)
    levels = [int(number) for number in arguments.concurrency.split(",")]
    rounds, waves = (1, 1) if arguments.quick else (arguments.rounds, arguments.waves)
    document: dict[str, Any] = {"bench": "peers", "ratio": {}, "ours": {}, "theirs": {}, "failed": {}}
    for name in arguments.peers.split(","):
        start, variants = PEERS[name]
        document["ours"][name], document["theirs"][name], document["ratio"][name] = {}, {}, {}
        for variant in variants:
            try:
                with ours(model, work, arguments.options) as us, start(model, work, variant) as them:
                    measured = {level: compare(us, them, level, rounds, waves) for level in levels}
            except PeerError as error:
                document["failed"][f"{name} {variant}".strip()] = str(error)
                print(f"{name} {variant}: {error}", flush=True)
                continue
            for level, (mine, other) in measured.items():
                print(f"{name} {variant} {level}: ours {mine:.1f}, theirs {other:.1f} tokens/s", flush=True)
                if other > document["theirs"][name].get(str(level), 0.0):
                    document["ours"][name][str(level)] = round(mine, 1)
                    document["theirs"][name][str(level)] = round(other, 1)
                    document["ratio"][name][str(level)] = round(mine / other, 3)
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    document |= {"quick": arguments.quick, "rounds": rounds, **machine_info("cpu"), "finished": finished}
    print(json.dumps(document))
    return 1 if document["failed"] else 0


def compare(us: Side, them: Side, concurrency: int, rounds: int, waves: int) -> tuple[float, float]:
    """Median tokens a second of both, loop by loop in turn; prompts are never repeated."""
    mine: list[float] = []
    others: list[float] = []
    number = concurrency * waves if concurrency > 1 else 2 * waves
    for turn in range(-1, rounds):  # a first turn that does not count
        asked = prompts(number, _PROMPT, REFERENCE["vocab_size"], 1000 * concurrency + turn)
        for side, other, results in ((us, them, mine), (them, us, others))[:: 1 if turn % 2 else -1]:
            other.pause()
            side.resume()
            rate = side.tokens_per_s(asked, concurrency, _OUTPUT)
            other.resume()
            if turn >= 0:
                results.append(rate)
    return statistics.median(mine), statistics.median(others)


if __name__ == "__main__":
    sys.exit(main())
