"""How much quality may be lost where nobody says another figure. Imports nothing, as command lines show it in help."""

from __future__ import annotations

from typing import Final

USUAL_BUDGET: Final = 0.005
"""Mean relative loss per generated token."""
