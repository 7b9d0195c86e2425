"""Judge a bundled-model folder: perplexity on the held-out text and retrieval accuracy by depth and length.

    python -m engine.bundled.evaluate --model DIR --text FOLDER [--lengths 256,512,1024,2048] [--json OUT]

Answers are judged as greedy decoding would give them: every digit of the answer must be the most likely token given
what precedes it, so one forward pass over prompt and answer decides.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn import functional

from engine.bundled.network import Network, NetworkConfig
from engine.bundled.tasks import ANSWER_WEIGHT, Document, TaskWriter
from engine.bundled.tokenizer import byte_token_ids
from engine.bundled.train import SYMBOLS, read_texts

DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)


def load_network(folder: Path) -> Network:
    """The saved folder as a float32 network."""
    saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = NetworkConfig(**{name: saved[name] for name in NetworkConfig.__dataclass_fields__})
    network = Network(config)
    network.load_state_dict({name: value.float() for name, value in load_file(folder / "model.safetensors").items()})
    return network.eval()


@torch.no_grad()
def perplexity(network: Network, ids: list[int], window: int, windows: int) -> tuple[float, int]:
    """Per-token perplexity over evenly spaced windows, and the number of tokens judged."""
    stride = max(window, (len(ids) - window - 1) // windows)
    total, count = 0.0, 0
    for start in range(0, len(ids) - window - 1, stride):
        piece = torch.tensor([ids[start : start + window + 1]])
        logits = network(piece[:, :-1])
        total += float(functional.cross_entropy(logits[0], piece[0, 1:], reduction="sum"))
        count += window
    return math.exp(total / count), count


@torch.no_grad()
def answered(network: Network, document: Document) -> bool:
    """Whether every answer token of the document is the greedy choice."""
    ids = torch.tensor([document.ids])
    guess = network(ids[:, :-1]).argmax(-1)[0]
    asked = torch.tensor(document.weights[1:]) >= ANSWER_WEIGHT
    return bool((guess[asked] == ids[0, 1:][asked]).all())


def evaluate(network: Network, writer: TaskWriter, lengths: list[int], samples: int) -> dict[str, Any]:
    """Share of documents answered whole: passkey by length and depth, lookup and tracking by length."""
    result: dict[str, Any] = {"passkey": {}, "lookup": {}, "tracking": {}, "samples_per_cell": samples}
    for length in lengths:
        result["passkey"][length] = {
            depth: sum(answered(network, writer.passkey(length, depth, needles=1)) for _ in range(samples)) / samples
            for depth in DEPTHS
        }
        for name, make in (("lookup", writer.lookup), ("tracking", writer.tracking)):
            result[name][length] = sum(answered(network, make(length)) for _ in range(samples)) / samples
    return result


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="model folder")
    parser.add_argument("--text", type=Path, required=True, help="folder of texts, as for training")
    parser.add_argument("--hold-out", default="austen_pride_and_prejudice", help="file name prefix of the judged text")
    parser.add_argument("--lengths", default="256,512,1024,2048", help="prompt lengths in tokens, comma separated")
    parser.add_argument("--samples", type=int, default=20, help="documents per cell")
    parser.add_argument("--windows", type=int, default=64, help="windows of 1,024 tokens for perplexity")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the result here too")
    arguments = parser.parse_args(argv)
    network = load_network(arguments.model)
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    _, held = read_texts(arguments.text, arguments.hold_out)
    ids = tokenizer.encode(held, add_special_tokens=False).ids
    writer = TaskWriter(tokenizer, ids, byte_token_ids(tokenizer)[:SYMBOLS], random.Random(arguments.seed))
    value, count = perplexity(network, ids, 1024, arguments.windows)
    result = {
        "held_out": arguments.hold_out,
        "perplexity_per_token": round(value, 3),
        "perplexity_tokens": count,
        "bytes_per_token": round(len(held.encode()) / len(ids), 3),
        **evaluate(network, writer, [int(part) for part in arguments.lengths.split(",")], arguments.samples),
    }
    text = json.dumps(result, indent=2)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
