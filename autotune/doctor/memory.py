"""Memory: what there is, what a cgroup leaves of it, huge pages, swap."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from autotune.doctor.finding import Finding, ok, problem, warning
from autotune.doctor.probes import Probes
from engine.sizes import format_size

_MEMINFO: Final = Path("/proc/meminfo")
_CGROUPS: Final = Path("/sys/fs/cgroup")
_TRANSPARENT: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_LEAST_BYTES: Final = 512 << 20  # an engine without any model takes about that
_LITTLE_BYTES: Final = 2 << 30
_NO_LIMIT: Final = 1 << 62  # how cgroups of the first version write "none"


def check_memory(probes: Probes) -> Iterator[Finding]:
    """What is available, and the tightest limit on this process."""
    known = _meminfo(probes)
    total, available = known.get("MemTotal"), known.get("MemAvailable")
    if total is None or available is None:
        yield warning("memory", f"{_MEMINFO} cannot be read", "mount /proc")
        return
    limit = cgroup_limit(probes)
    usable = available
    if limit is not None and limit[0] < total:
        size, used, where = limit
        usable = min(available, max(0, size - used))
        yield warning(
            "memory limit",
            f"{format_size(size)} by {where}, less than the machine's {format_size(total)}",
            "an engine's own choice of a pool goes by the machine: give it --kv-pool-bytes, and leave the weights room",
        )
    text = f"{format_size(usable)} of {format_size(total)} available"
    if usable < _LEAST_BYTES:
        yield problem("memory", text, "end other programs, or raise the limit: no engine starts in this")
    elif usable < _LITTLE_BYTES:
        yield warning("memory", text, "enough for small models only; `autotune plan MODEL --gpu cpu` says what fits")
    else:
        yield ok("memory", text)
    swap = known.get("SwapTotal", 0)
    if swap:
        yield warning(
            "swap",
            f"{format_size(swap)}; KV that is swapped out makes steps take seconds",
            "under systemd the units forbid it (MemorySwapMax=0); elsewhere switch it off, or lower vm.swappiness",
        )


def check_huge_pages(probes: Probes) -> Iterator[Finding]:
    """Arenas on a processor ask for transparent huge pages."""
    mode = re.search(r"\[(\w+)\]", probes.read(_TRANSPARENT) or "")
    if mode is None or mode[1] == "never":
        found = "switched off" if mode else "not offered by this kernel"
        yield warning(
            "huge pages",
            f"transparent huge pages are {found}",
            f"echo madvise > {_TRANSPARENT} (as root): attention on a processor reads large arenas",
        )
    else:
        yield ok("huge pages", f"transparent huge pages: {mode[1]}")
    known = _meminfo(probes)
    reserved = known.get("HugePages_Total", 0) * known.get("Hugepagesize", 0)
    if reserved:
        yield warning(
            "reserved huge pages",
            f"{format_size(reserved)} are set aside, which an engine cannot use",
            "set vm.nr_hugepages=0 unless another program needs them",
        )


def cgroup_limit(probes: Probes) -> tuple[int, int, str] | None:
    """The tightest memory limit on this process, what is used of it, and the file that says so; None without any."""
    found: list[tuple[int, int, str]] = []
    for line in (probes.read(Path("/proc/self/cgroup")) or "").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0":
            found += _limits(probes, _CGROUPS, name, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            found += _limits(probes, root, name, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(found, default=None)


def _limits(probes: Probes, root: Path, name: str, most: str, used: str) -> Iterator[tuple[int, int, str]]:
    """Limits of a cgroup and of all above it: each holds."""
    folder = root / name.lstrip("/")
    while True:
        limit = (probes.read(folder / most) or "").strip()
        if limit.isdecimal() and int(limit) < _NO_LIMIT:
            now = (probes.read(folder / used) or "").strip()
            yield int(limit), int(now) if now.isdecimal() else 0, str(folder / most)
        if folder == root or root not in folder.parents:
            return
        folder = folder.parent


def _meminfo(probes: Probes) -> dict[str, int]:
    """Bytes, or numbers of pages where there is no unit."""
    rows = re.findall(r"^(\w+):\s+(\d+)( kB)?", probes.read(_MEMINFO) or "", re.MULTILINE)
    return {name: int(value) * (1024 if unit else 1) for name, value, unit in rows}
