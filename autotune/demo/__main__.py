"""``python -m autotune.demo``: the same as ``autotune run --demo``."""

from __future__ import annotations

import sys

from autotune.cli import app
from autotune.cli._shared import fail_with

if __name__ == "__main__":
    sys.exit(fail_with(lambda: app(["run", "--demo", *sys.argv[1:]], standalone_mode=False)))
