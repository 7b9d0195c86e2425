"""Where computing a prompt again beats keeping its KV: ``python -m autotune.evidence.stateless``; last line JSON.

A request may carry its whole context and find nothing cached (stateless), find its KV on the device, or have it copied
back from host memory. The model is profiled here; the fitted step times say what each costs by length.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from autotune import profiling
from autotune.demo.bundled import bundled_model
from engine.memory_model import token_bytes
from engine.transfers import Direction
from envs.offload import prompt_counts, token_counts

if TYPE_CHECKING:
    from envs.profile import Profile

_LENGTHS: Final = (16, 64, 256, 1024, 2048)
_POOL_BYTES: Final = 256 << 20


def times(profile: Profile, lengths: Sequence[int] = _LENGTHS) -> dict[str, Any]:
    """Milliseconds until the token after a prompt of each length: computed anew, with its KV on the device, or on the
    host; and from how many tokens on the host is faster than computing (None: never up to the model's longest).
    """
    groups, model, link = profile.groups(), profile.latency_model(), profile.host_link()
    if profile.offload is None or link is None:
        raise ValueError("a profile without a link to host memory cannot say what a copy costs")
    per_token = sum(token_bytes(group.shape) for group in groups)
    table = {}
    for tokens in (length for length in lengths if length < profile.model.max_model_len):
        hit_ns = model.step_ns(token_counts(groups, tokens))
        copy_ns = link.copy_ns(Direction.IN, round(tokens * per_token))
        computed_ns = model.step_ns(prompt_counts(groups, tokens + 1, model.knee_tokens))
        ns = {"computed": computed_ns, "on_device": hit_ns, "on_host": copy_ns + hit_ns}
        table[str(tokens)] = {name: round(value / 1e6, 3) for name, value in ns.items()}
    return {
        "stateless_ms": table,
        "crossover_tokens": profile.offload.crossover_tokens,
        "link_bytes_per_s": round(profile.offload.bytes_per_s),
        "link_emulated": profile.offload.emulated,
        "profile": profile.describe(),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Profile the bundled model, print the times, return 0."""
    parser = argparse.ArgumentParser(prog="python -m autotune.evidence.stateless", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--quick", action="store_true", help="few loads")
    arguments = parser.parse_args(argv)
    profile = profiling.measure(
        bundled_model(), pool_bytes=_POOL_BYTES, device="cpu", dtype="auto", threads=1, quick=arguments.quick
    )
    result = times(profile)
    for tokens, row in result["stateless_ms"].items():
        print(f"{tokens:>6} tokens: " + ", ".join(f"{name} {value:g} ms" for name, value in row.items()))
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
