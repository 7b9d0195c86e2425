"""Names under which knobs are written, and what they mean: the daemon and the command line share them."""

from __future__ import annotations

from typing import Final

OWN_WRITER: Final = "autotune"
STARTUP_WRITER: Final = "startup"
"""The engine's word for a value that nobody has written since it started."""
OPERATOR_PREFIX: Final = "operator:"
RELEASE_PREFIX: Final = "release:"
"""A knob written under such a name belongs to the daemon again, whoever had it before."""
