"""The block tables of a batch as kernels see them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class TableView:
    """Block tables of the sequences of one batch, for one layer group, on the arena's device.

    Entries of a sequence are in position order. An evicted range is simply absent: positions are taken from each
    entry's ``first``, never from its place in the table. Of a block only the first ``valid`` tokens belong to the
    sequence, the rest must not be read; the next entry may start at ``first + valid``.

    Attributes:
        entries: int32 [sequences, max_entries, 4], columns ``kernels.layout.ENTRY_*``; rows past a sequence's
            ``num_entries`` are never read.
        num_entries: int32 [sequences]; 0 stands for a padding sequence, whose output is zero.
        query_first: int32 [sequences], absolute position of the sequence's first query in this call (for decode: of
            its only one).
        max_position: an upper bound of ``query_first`` known to the host, or None; without it a GPU decode has to
            wait for the device to learn how far its sequences reach.
    """

    entries: torch.Tensor
    num_entries: torch.Tensor
    query_first: torch.Tensor
    max_position: int | None = None

    @property
    def num_sequences(self) -> int:
        return self.entries.shape[0]
