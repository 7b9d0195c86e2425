"""Copies of blocks between device and host memory, as bookkeeping plans them and an executor makes them. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

EMULATED_LINK_SHARE = 1 / 20  # of the memory's bandwidth: about what PCIe is to a GPU's

CopyRow = tuple[int, int, int]  # first source byte, first target byte, number of bytes


class Direction(StrEnum):
    OUT = "out"  # device to host
    IN = "in"


@dataclass(frozen=True)
class Transfer:
    """One copy of some blocks of a layer group from one tier's arena to the other's.

    ``number`` is unique for ever; the executor reports it when the bytes have arrived. Until then sources are neither
    written nor reused, targets neither read nor reused.
    """

    number: int
    direction: Direction
    group: int
    rows: tuple[CopyRow, ...]

    @property
    def num_bytes(self) -> int:
        return sum(row[2] for row in self.rows)


@dataclass(frozen=True)
class HostLink:
    """What joins the tiers: bytes per second each way, and whether that is a configured figure instead of a device.
    ``copy_s``: what each copy takes besides.

    Raises ValueError for rates that are not positive.
    """

    out_bytes_per_s: float
    in_bytes_per_s: float
    is_emulated: bool = True
    copy_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.out_bytes_per_s > 0 and self.in_bytes_per_s > 0):
            raise ValueError(f"a link moves bytes: give rates above 0, not {self}")

    def copy_ns(self, direction: Direction, num_bytes: int) -> int:
        """How long it takes to move so many bytes, with nothing else under way."""
        rate = self.out_bytes_per_s if direction is Direction.OUT else self.in_bytes_per_s
        return round((self.copy_s + num_bytes / rate) * 1e9)

    def bytes_in(self, direction: Direction, duration_ns: float) -> int:
        """How many bytes it moves in a time."""
        rate = self.out_bytes_per_s if direction is Direction.OUT else self.in_bytes_per_s
        return int(rate * duration_ns / 1e9)
