"""What a storage format or an eviction costs: passkeys answered by the engine itself, per setting of its tunables.

    python -m engine.bundled.formats --model DIR --text FOLDER [--lengths 512,1024] [--json OUT]

Prompts run through the engine's own scheduler, cache and kernels, and everything that a setting makes eligible is
recoded at once, so that a figure depends on nothing but model, prompts and setting.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer

from engine.bundled.tasks import ANSWER_WEIGHT, Document, TaskWriter
from engine.bundled.tokenizer import byte_token_ids
from engine.bundled.train import SYMBOLS, read_texts
from engine.loader import LoadedModel, load_model
from engine.offline import generate
from engine.request import SamplingParams
from engine.tunables import TunableValue

POOL_BYTES = 256 << 20
SETTINGS: Mapping[str, Mapping[str, TunableValue]] = {
    "native": {},
    "int8": {"kv_format": "int8"},
    "k8v4": {"kv_format": "k8v4"},
    "int4": {"kv_format": "int4"},
    "window 512": {"eviction": "window", "keep_tokens": 512},
    "window 256": {"eviction": "window", "keep_tokens": 256},
    "heavy_hitter 512": {"eviction": "heavy_hitter", "keep_tokens": 512},
    "heavy_hitter 256": {"eviction": "heavy_hitter", "keep_tokens": 256},
}


def answered(loaded: LoadedModel, documents: list[Document], values: Mapping[str, TunableValue]) -> float:
    """Share of passkey documents whose digits the engine generates right, greedy, given the words before them."""
    prompts, answers = [], []
    for document in documents:
        start = next(i for i, weight in enumerate(document.weights) if weight >= ANSWER_WEIGHT)
        stop = next(i for i in range(start, len(document.ids)) if document.weights[i] < ANSWER_WEIGHT)
        prompts.append(document.ids[:start])
        answers.append(document.ids[start:stop])
    params = [SamplingParams(max_tokens=len(answer), ignore_eos=True) for answer in answers]
    results = generate(loaded, prompts, params, pool_bytes=POOL_BYTES, values=values)
    right = sum(result.output_ids == answer for result, answer in zip(results, answers, strict=True))
    return right / len(answers)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--text", type=Path, required=True, help="folder of texts, as for training")
    parser.add_argument("--hold-out", default="austen_pride_and_prejudice", help="file name prefix of the filler text")
    parser.add_argument("--lengths", default="512,1024", help="prompt lengths in tokens, comma separated")
    parser.add_argument("--samples", type=int, default=40, help="documents per cell, at random depths")
    parser.add_argument("--dtype", default="auto", help="auto, float32 or bfloat16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args(argv)
    loaded = load_model(arguments.model, dtype=arguments.dtype)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    _, held = read_texts(arguments.text, arguments.hold_out)
    filler = tokenizer.encode(held, add_special_tokens=False).ids
    symbols = byte_token_ids(tokenizer)[:SYMBOLS]
    result: dict[str, dict[str, float]] = {}
    for length in arguments.lengths.split(","):
        writer = TaskWriter(tokenizer, filler, symbols, random.Random(arguments.seed))
        documents = [writer.passkey(int(length), needles=1) for _ in range(arguments.samples)]
        for name, values in SETTINGS.items():
            result.setdefault(name, {})[length] = answered(loaded, documents, values)
    document = {"passkey_answered": result, "samples_per_cell": arguments.samples, "dtype": str(loaded.model.dtype)}
    text = json.dumps(document, indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
