"""Every server that the product asks something."""

from __future__ import annotations

from typing import Final

from peer import Peer
from peers_engines import engines
from peers_fleet import prometheus
from peers_own import own
from peers_replay import servers

PEERS: Final[tuple[Peer, ...]] = (*engines(), *own(), *prometheus(), *servers())
