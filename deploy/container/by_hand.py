"""Carries out every step of the container file by hand, in roots of its own, where no container engine is at hand.

    sudo python3 deploy/container/by_hand.py --base ROOT --work DIR [--arg NAME=VALUE] [--give /etc/pip.conf ...]

``ROOT`` is a clean root file system with Python (``debootstrap --variant=minbase --include=python3,python3-venv ...``),
which stands for the base image; it is only copied. Every stage gets a copy of the root that it is built on; RUN steps
run in it by chroot with an empty environment, COPY steps copy. In the end the stages that have a command are asked for
``autotune --version``, as their user. One line per step; the last line is JSON. Exit code 1 when a step fails. Stdlib
only.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# proc and dev are mounted for the step alone, in a mount namespace of its own.
_STEP = (
    'user=$1; shift; mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && '
    'exec chroot ${user:+--userspec="$user"} "$0" /usr/bin/env -i "$@"'
)


@dataclass
class Stage:
    """A root under construction: its environment, where it works and as whom."""

    root: Path
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": _PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = ""
    has_command: bool = False


def instructions(text: str) -> list[tuple[str, str]]:
    """Words and the rest of each line, comments left out and continued lines joined."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines())]


def expanded(text: str, values: dict[str, str]) -> str:
    """``$NAME`` and ``${NAME}`` replaced where they are known."""
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", lambda found: values.get(found[1] or found[2], found[0]), text)


def run(stage: Stage, command: list[str], user: str = "") -> int:
    """A command inside a stage's root; its exit code."""
    values = {**stage.arguments, **stage.environment}
    words = [f"{name}={value}" for name, value in values.items()]
    line = ["unshare", "--mount", "--fork", "sh", "-c", _STEP, str(stage.root), user, *words, *command]
    return subprocess.run(line, check=False).returncode


class Builder:
    """Goes through the file and keeps the roots of its stages."""

    def __init__(self, base: Path, work: Path, given: dict[str, str], files: list[Path]) -> None:
        self._base, self._work, self._given, self._files = base, work, given, files
        self._arguments: dict[str, str] = {}
        self.stages: dict[str, Stage] = {}
        self.steps: list[dict[str, object]] = []
        self._stage: Stage | None = None

    def step(self, word: str, rest: str) -> int:
        """Carry out one instruction; 0 if it went well."""
        begin = time.monotonic()
        code = self._do(word, rest)
        seconds = round(time.monotonic() - begin, 1)
        self.steps.append({"step": f"{word} {rest}", "code": code, "seconds": seconds})
        print(f"{'ok' if code == 0 else f'FAILED ({code})'} {seconds:6.1f} s  {word} {rest[:150]}", flush=True)
        return code

    def _do(self, word: str, rest: str) -> int:
        if word == "ARG":
            name, _, default = rest.partition("=")
            value = self._given.get(name, default)
            (self._arguments if self._stage is None else self._stage.arguments)[name] = value
        elif word == "FROM":
            self._from(*expanded(rest, self._arguments).split(" AS "))
        elif self._stage is None:
            return 1
        elif word == "RUN":
            return run(self._stage, ["sh", "-c", f"cd {shlex.quote(self._stage.folder)} && {rest}"], self._stage.user)
        elif word == "COPY":
            return self._copy(self._stage, rest.split())
        elif word == "ENV":
            for pair in shlex.split(expanded(rest, self._stage.environment)):
                name, _, value = pair.partition("=")
                self._stage.environment[name] = value
        elif word == "WORKDIR":
            self._stage.folder = rest
            (self._stage.root / rest.lstrip("/")).mkdir(parents=True, exist_ok=True)
        elif word == "USER":
            self._stage.user = rest
        elif word == "CMD":
            self._stage.has_command = True
        elif word not in {"ENTRYPOINT", "EXPOSE"}:
            print(f"unknown instruction {word}")
            return 1
        return 0

    def _from(self, base: str, name: str) -> None:
        root = self._work / name
        before = self.stages.get(base)
        origin = before.root if before else self._base
        subprocess.run(["cp", "-a", "--reflink=auto", str(origin), str(root)], check=True)
        stage = Stage(root)
        if before is not None:
            stage.environment, stage.folder, stage.user = dict(before.environment), before.folder, before.user
        for file in self._files:
            target = root / str(file).lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
        self.stages[name] = self._stage = stage

    def _copy(self, stage: Stage, words: list[str]) -> int:
        source = ROOT
        if words[0].startswith("--from="):
            source = self.stages[words.pop(0).removeprefix("--from=")].root
        *names, target = words
        place = stage.root / (target if target.startswith("/") else f"{stage.folder}/{target}").lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        for name in names:
            origin = source / name.lstrip("/")
            if origin.is_dir():
                shutil.copytree(
                    origin, place, dirs_exist_ok=True, symlinks=True, ignore=shutil.ignore_patterns("__pycache__")
                )
            else:
                shutil.copy(origin, place / origin.name if place.is_dir() else place)
        return 0


def main() -> int:
    reader = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    reader.add_argument("--base", type=Path, required=True, help="clean root that stands for the base image")
    reader.add_argument("--work", type=Path, required=True, help="empty folder for the stages' roots")
    reader.add_argument("--arg", action="append", default=[], metavar="NAME=VALUE", help="a build argument")
    reader.add_argument(
        "--give", type=Path, action="append", default=[], help="file of this machine that every root gets"
    )
    given = reader.parse_args()
    builder = Builder(given.base, given.work, dict(pair.split("=", 1) for pair in given.arg), given.give)
    failed = False
    for word, rest in instructions((ROOT / "deploy/container/Containerfile").read_text()):
        failed = builder.step(word, rest) != 0
        if failed:
            break
    versions = {}
    for name, stage in builder.stages.items():
        if stage.has_command and not failed:
            code = run(stage, ["autotune", "--version"], stage.user)
            versions[name] = code
            failed = code != 0
    print(json.dumps({"steps": builder.steps, "versions": versions, "failed": failed}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
