"""Where the engine's sockets live. Stdlib only: everything that talks to an engine agrees on the default here."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# sockaddr_un.sun_path has 108 bytes, of which the last is the terminating zero.
MAX_SOCKET_PATH_BYTES = 107


def default_control_socket(environ: Mapping[str, str] | None = None, uid: int | None = None) -> Path:
    """The control socket used when none is named.

    ``$XDG_RUNTIME_DIR/kv-autotune/engine.sock`` for a user with a runtime directory, ``/run/kv-autotune/engine.sock``
    for root, else ``/tmp/kv-autotune-<uid>/engine.sock``. Creates nothing.
    """
    environ = os.environ if environ is None else environ
    uid = os.getuid() if uid is None else uid
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    if runtime.startswith("/"):
        return Path(runtime) / "kv-autotune" / "engine.sock"
    if uid == 0:
        return Path("/run/kv-autotune/engine.sock")
    return Path(f"/tmp/kv-autotune-{uid}/engine.sock")  # noqa: S108 - the folder is created 0700 and its owner checked
