"""Continuous batching of transformers, without a server. Run by the peer's own environment: it imports nothing of this
project. Reads lines of JSON from stdin ({"prompts": [[ids]], "output": 64, "concurrency": 8}), writes one for each.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def load(folder: str) -> tuple[Any, Any, Any]:
    import torch  # noqa: PLC0415 - only the peer's environment is sure to have these
    from transformers import AutoModelForCausalLM, GenerationConfig  # noqa: PLC0415
    from transformers.generation.configuration_utils import ContinuousBatchingConfig  # noqa: PLC0415

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="sdpa").eval()  # type: ignore[no-untyped-call]
    return model, GenerationConfig, ContinuousBatchingConfig


def main(folder: str) -> None:
    model, generation, batching = load(folder)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        config = generation(
            max_new_tokens=asked["output"], do_sample=False, eos_token_id=-1, pad_token_id=1, use_cache=True
        )
        begin_s, tokens, prompts = time.perf_counter(), 0, asked["prompts"]
        # It has no limit on requests at a time, so that a closed loop becomes waves of as many prompts.
        for start in range(0, len(prompts), asked["concurrency"]):
            made = model.generate_batch(
                inputs=prompts[start : start + asked["concurrency"]],
                generation_config=config,
                continuous_batching_config=batching(num_blocks=256, max_batch_tokens=512, page_size=32),
                progress_bar=False,
                warmup=False,
            )
            tokens += sum(len(one.generated_tokens) for one in made.values())
        wall_s = time.perf_counter() - begin_s
        print(json.dumps({"tokens": tokens, "wall_s": wall_s}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
