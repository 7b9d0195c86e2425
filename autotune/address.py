"""Where something that listens can be reached from this machine."""

from __future__ import annotations


def reachable(host: str, port: int) -> str:
    """``http://host:port``; what listens on every address is asked for on loopback."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # not listening here
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
