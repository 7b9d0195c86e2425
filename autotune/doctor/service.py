"""Configuration, engine and daemon: what is written, and what answers."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any

from autotune.config import Config, ConfigError, files_named_in, load_config
from autotune.doctor.device import driver_version, nvidia_devices
from autotune.doctor.finding import Finding, ok, problem, warning
from autotune.doctor.probes import Probes
from autotune.wiring import check_rules, guard_of, policy_of
from engine.control_client import ControlClient, EngineUnreachable
from engine.json_text import load_json


def check_config(file: Path | None) -> Iterator[Finding]:
    """A configuration with the rules, profile and policy that it names; None: there is none, and defaults hold."""
    if file is None:
        yield ok("configuration", "none given, defaults hold")
        return
    try:
        config = load_config(file)
        policy_of(config, check_rules(config))
        guard_of(config)
    except ConfigError as error:
        for line in error.problems:
            yield problem("configuration", f"{file}: {line}", f"mend it; autotune check-config {file} tells the rest")
        return
    yield ok("configuration", f"{file}: mode {config.mode}")


def readable_config(file: Path | None) -> Config:
    """The configuration as far as it can be read, else defaults, so that other checks can go on."""
    if file is None:
        return Config()
    try:
        return load_config(file)
    except ConfigError:
        return files_named_in(file) or Config()


def ask_engine(control: Path, timeout_s: float = 5.0) -> Mapping[str, str]:
    """What the engine on a control socket says of itself. Raises EngineUnreachable."""
    with ControlClient(control, timeout_s=timeout_s) as client:
        return {"model": client.stats().model, **client.about()}


def ask_daemon(address: str, timeout_s: float = 5.0) -> Mapping[str, Any] | None:
    """The status of the daemon at an address, None if none answers there."""
    try:
        with urllib.request.urlopen(f"{address}/status", timeout=timeout_s) as answer:  # noqa: S310  # http only
            document = load_json(answer.read())
    except (OSError, ValueError, HTTPException):
        return None
    return document if isinstance(document, dict) and "mode" in document else None


def check_engine(probes: Probes, ask: Callable[[], Mapping[str, str]], version: str) -> Iterator[Finding]:
    """Whether the engine answers, is of our version, and computes where it should. ``version``: of this program."""
    try:
        about = ask()
    except EngineUnreachable as error:
        yield warning(
            "engine", str(error), "start one: autotune engine --model DIR, or systemctl start autotune-engine"
        )
        return
    theirs, device = about.get("version"), about.get("device")
    text = f"serves {about['model']}" + (
        f", version {theirs}, torch {about.get('torch')}, on {device}" if theirs else ""
    )
    if theirs is None:
        yield warning("engine", f"{text}; it does not tell its version", "it is older than this program: restart it")
    elif theirs != version:
        yield warning(
            "engine",
            f"{text}; this program is {version}",
            "restart whichever is older (systemctl restart autotune-engine)",
        )
    else:
        yield ok("engine", text)
    if device == "cpu" and (nvidia_devices(probes) or driver_version(probes) is not None):
        yield problem(
            "engine's device",
            "THE ENGINE RUNS ON THE PROCESSOR although this machine has an NVIDIA device",
            "mend what is said of torch and the device, then restart it; --device cuda makes it refuse instead",
        )


def check_daemon(status: Mapping[str, Any] | None, address: str) -> Iterator[Finding]:
    """Whether a daemon answers and is well."""
    if status is None:
        yield warning("daemon", f"none answers at {address}", "start one: autotune daemon, or systemctl start autotune")
    elif not status.get("healthy"):
        why = status.get("problem") or f"engine {status.get('engine')}"
        yield problem("daemon", f"answers at {address}, and is not well: {why}", "autotune status tells more")
    else:
        yield ok("daemon", f"answers at {address}: mode {status['mode']}, policy {status.get('policy')}")
