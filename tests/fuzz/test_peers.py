"""Whatever a server answers, who asks it goes on, or says in one line what is wrong."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from pathlib import Path

import pytest
from canned import Canned, pages
from hypothesis import given
from mangle import examples
from peer import Peer
from peers import PEERS


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
def test_whatever_a_server_answers_who_asks_goes_on(peer: Peer) -> None:
    good = peer.documents()

    def ask(path: str = "", sent: bytes = b"") -> None:
        folder = Path(tempfile.mkdtemp(prefix="kv-fuzz-"))
        try:
            with Canned(folder / "s" if peer.unix else None) as server:
                usual = pages(good)
                server.reply = lambda method, asked, body: (
                    sent if asked.partition("?")[0] == path else usual(method, asked, body)
                )
                peer.ask(server, folder)
        finally:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)

    ask()

    @examples(peer.examples)
    @given(peer.bad(good))
    def ask_badly(bad: tuple[str, bytes]) -> None:
        ask(*bad)

    ask_badly()
