"""The ``autotune`` command, also as ``python -m autotune``."""

from __future__ import annotations

import sys
from pathlib import Path

from autotune.shadowed import shadows


def main() -> None:
    """Refuse to start over somebody else's packages, then do what the command line says."""
    lines = list(shadows(Path(__file__).resolve().parents[1]))
    if lines:
        sys.stderr.writelines(f"error: {line}\n" for line in lines)
        sys.exit(1)
    from autotune.cli import main as command  # noqa: PLC0415  # not before it is known to be ours

    command()


if __name__ == "__main__":
    main()
