"""Refuse a virtual environment in which another distribution owns one of our import names.

Hugging Face's ``kernels`` has the same import name as our folder; whichever comes first on the path would win silently.
Run by ``make`` after an installation: ``python -m autotune.venv_check``.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

OUR_DISTRIBUTION = "kv-autotune"
OUR_PACKAGES = ("autotune", "policies", "envs", "engine", "kernels")


def foreign_owners(owners: Mapping[str, Sequence[str]]) -> list[str]:
    """One line per import name of ours that a foreign distribution provides too; empty when all is well."""
    return [
        f"the distribution {distribution!r} also provides the package {package!r}: uninstall it here"
        for package in OUR_PACKAGES
        for distribution in sorted(set(owners.get(package, ())) - {OUR_DISTRIBUTION})
    ]


def main() -> int:
    from importlib.metadata import packages_distributions  # noqa: PLC0415  # slow, and every command reads this file

    problems = foreign_owners(packages_distributions())
    for problem in problems:
        sys.stderr.write(f"kv-autotune: {problem}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
