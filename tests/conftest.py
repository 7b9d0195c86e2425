"""What holds for all tests: other processes of the suite run beside them."""

from __future__ import annotations

from hypothesis import settings

# How long an example takes says more about those others than about the code (the default bound is 0.2 s of wall clock).
settings.register_profile("beside-others", deadline=None)
settings.load_profile("beside-others")
