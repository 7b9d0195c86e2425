"""The page of evidence: claims, figures, verdicts and commands, as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from autotune.evidence.claims import Claim
from autotune.evidence.finding import Finding
from autotune.evidence.sources import SOURCES

_HEADER: Final = """# The literature's claims, measured

<!-- Written by `make evidence`; edit autotune/evidence instead. -->

A survey of KV-cache optimisation makes ten claims. Each is measured here on this engine, on one machine, in one go:

```sh
make evidence TEXT=FOLDER TRACES=FOLDER
```

Verdicts are computed from the figures (`autotune/evidence/claims.py`): *met* within 2 % of what is claimed, *beaten*
beyond it. Figures are of the bundled model on a CPU unless they say otherwise; **nothing here was measured on a GPU**,
and claims about large models may come out otherwise there.
"""

_SCOPE: Final = """## Out of scope

The survey looks ahead to three things. Tuning by reinforcement learning is built ([training](train.md)). Two are
not: *hardware with atomic operations on KV* cannot be built in software, and *attention without an explicit cache* is
another model architecture, not a way of serving today's.
"""


def page(found: Mapping[str, Finding], claims: Sequence[Claim], machine: Mapping[str, Any], date: str) -> str:
    """Markdown. ``machine``: of ``machine_info``; ``date``: when the last source ended."""
    rows = ["| | claim | figure | verdict |", "|---|---|---|---|"]
    remarks, used = [], dict[str, list[str]]()
    for claim in claims:
        one = found[claim.name]
        rows.append(f"| {claim.name} | {claim.text} | {_cell(one.figures)} | **{one.verdict.value}** |")
        if one.remark:
            remarks.append(f"- **{claim.name}**: {one.remark}")
        for source in claim.sources:
            used.setdefault(source, []).append(claim.name)
    commands = ["| for | command |", "|---|---|"]
    commands += [f"| {', '.join(names)} | `{SOURCES[source].shown()}` |" for source, names in used.items()]
    versions = ", ".join(f"{name} {value}" for name, value in machine.get("versions", {}).items())
    device, processors = machine.get("device", "unknown"), machine.get("processors", "?")
    where = f"Measured {date} on {device}, {processors} processors; {versions}."
    parts = [_HEADER, where, "\n".join(rows), "## What the figures do not say", "\n".join(remarks)]
    parts += ["## Commands", "\n".join(commands), _SCOPE]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
