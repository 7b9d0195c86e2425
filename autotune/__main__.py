"""``python -m autotune``: the same as the ``autotune`` command."""

from __future__ import annotations

from autotune.cli import main

main()
