"""What the journal keeps of a run so that its ticks can be decided again: configuration, rules, digests of files."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from autotune.config import Config, problems_of
from policies.base import Policy
from policies.expressions import ExpressionError, parse_condition
from policies.rules import Rule, RuleSet
from policies.stand_in import refusal_of


class RunError(Exception):
    """A run cannot be decided again, in one line that says why."""


def run_document(config: Config, rules: RuleSet) -> str:
    """The document as JSON text."""
    document = {
        "config": config.model_dump(mode="json"),
        "rules": rules_document(rules),
        "files": file_digests(config),
    }
    return json.dumps(document)


def read_run(document: Mapping[str, Any]) -> tuple[Config, RuleSet]:
    """Inverse of :func:`run_document`.

    Raises RunError when it was written by another version, or a file that the policy was made from is not the same.
    """
    try:
        config = Config.model_validate(document["config"])
        rules = rules_from(document["rules"])
        files: Mapping[str, str] = document["files"]
    except ValidationError as error:
        raise RunError(f"its configuration is of another version: {problems_of(error)[0]}") from error
    except (KeyError, TypeError, ExpressionError) as error:
        raise RunError(f"it was recorded by another version ({error!r:.80})") from error
    for name, digest in files.items():
        if digest_of(Path(name)) != digest:
            raise RunError(f"{name} is not what it was then")
    return config, rules


def rules_document(rules: RuleSet) -> dict[str, Any]:
    """The rules as JSON-able values, conditions as their text."""
    return {
        "name": rules.name,
        "dwell_s": rules.dwell_s,
        "otherwise": dict(rules.otherwise),
        "rules": [
            {
                "name": rule.name,
                "because": rule.because,
                "priority": rule.priority,
                "when": rule.when.text,
                "for_s": rule.for_s,
                "release": None if rule.release is None else rule.release.text,
                "release_for_s": rule.release_for_s,
                "set": dict(rule.sets),
            }
            for rule in rules.rules
        ],
    }


def rules_from(document: Mapping[str, Any]) -> RuleSet:
    """Inverse of :func:`rules_document`. Raises KeyError, TypeError or ExpressionError for anything else."""
    rules = tuple(
        Rule(
            row["name"],
            row["because"],
            parse_condition(row["when"]),
            tuple(row["set"].items()),
            row["priority"],
            row["for_s"],
            None if row["release"] is None else parse_condition(row["release"]),
            row["release_for_s"],
        )
        for row in document["rules"]
    )
    return RuleSet(document["name"], rules, tuple(document["otherwise"].items()), document["dwell_s"])


def file_digests(config: Config) -> dict[str, str]:
    """By path, what is in the files that the policy is made from beside the configuration and the rules."""
    section = config.policy
    paths = [section.profile, section.learned if section.use == "learned" else None]
    if section.use == "auto":
        from policies.auto import BUNDLED  # noqa: PLC0415  # reads weights, which nobody else needs

        paths += sorted(entry for entry in BUNDLED.iterdir() if entry.is_dir()) if BUNDLED.is_dir() else []
    return {str(path): digest_of(path) for path in paths if path is not None}


def digest_of(path: Path) -> str:
    """SHA-256 of a file, or of a folder's files by name; the error in place of one that cannot be read."""
    digest = hashlib.sha256()
    try:
        for file in sorted(entry for entry in path.iterdir() if entry.is_file()) if path.is_dir() else [path]:
            digest.update(os.fsencode(file.name) + b"\0")  # a name need not be UTF-8
            digest.update(file.read_bytes())
    except OSError as error:
        return f"unreadable: {error.strerror}"
    return digest.hexdigest()


def in_force(config: Config, policy: Policy) -> Config:
    """The configuration by which ``policy`` decides: where rules stand in for another policy, that of the rules."""
    if not refusal_of(policy):
        return config
    return config.model_copy(update={"policy": config.policy.model_copy(update={"use": "rules", "learned": None})})
