"""Train the bundled model on a folder of text and generated retrieval tasks; checkpointed and resumable.

    python -m engine.bundled.train --text FOLDER --hold-out austen_pride_and_prejudice --work WORK --tokens 15e6

The curriculum goes from short to long sequences. Copying, the root of retrieval, has to appear first, and it appears
early only on repeated random sequences over one small fixed set of symbols; the later phases turn it into retrieval
by name at growing distance. The learning rate warms up, stays, and falls to zero over the last part of ``--tokens``,
so that a run can be cut short or lengthened by resuming with another total.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch.nn import functional

from engine.bundled.network import Network, NetworkConfig
from engine.bundled.tasks import Document, TaskWriter
from engine.bundled.tokenizer import BOS, END, PAD, byte_token_ids, save_tokenizer, token_id, train_tokenizer

TOKENS_PER_STEP = 8192
SYMBOLS = 128
PEAK_RATE = 1e-3
WARMUP_STEPS = 100
DECAY_SHARE = 0.2


@dataclass(frozen=True)
class Phase:
    """From ``start`` tokens on: sequence length and the share of each kind of document."""

    start: float
    length: int
    repeated: float
    passkey: float
    lookup: float
    tracking: float

    @property
    def text(self) -> float:
        return 1.0 - self.repeated - self.passkey - self.lookup - self.tracking


PHASES = (
    Phase(0.0, 128, repeated=0.60, passkey=0.08, lookup=0.06, tracking=0.01),
    Phase(4.6e6, 256, repeated=0.15, passkey=0.22, lookup=0.15, tracking=0.05),
    Phase(7.4e6, 512, repeated=0.08, passkey=0.27, lookup=0.13, tracking=0.06),
    Phase(8.6e6, 1024, repeated=0.05, passkey=0.27, lookup=0.10, tracking=0.05),
    Phase(12.5e6, 2048, repeated=0.04, passkey=0.27, lookup=0.08, tracking=0.04),
)


def phase_at(tokens: float) -> Phase:
    return max((phase for phase in PHASES if phase.start <= tokens), key=lambda phase: phase.start)


def learning_rate(step: int, total_steps: int) -> float:
    """Warm-up, plateau, linear decay to zero over the last ``DECAY_SHARE`` of the run."""
    decay = min(1.0, (total_steps - step) / (DECAY_SHARE * total_steps))
    return PEAK_RATE * min(1.0, (step + 1) / WARMUP_STEPS) * max(0.0, decay)


def read_texts(folder: Path, hold_out: str) -> tuple[list[str], str]:
    """All texts of the folder (.txt or .txt.gz) and, apart from them, the one whose name starts with ``hold_out``."""
    texts, held = [], ""
    for path in sorted([*folder.glob("*.txt"), *folder.glob("*.txt.gz")]):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8", errors="replace")
        if path.name.startswith(hold_out):
            held = text
        else:
            texts.append(text)
    if not texts or not held:
        sys.exit(f"train: {folder} needs at least two texts (.txt, .txt.gz), one of them named {hold_out}*")
    return texts, held


def make_batch(writer: TaskWriter, phase: Phase, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [rows, length + 1] and loss weights of the same shape; short documents are followed by text."""
    length = phase.length + 1
    rows = [_row(writer, phase, rng, length) for _ in range(TOKENS_PER_STEP // phase.length)]
    ids = torch.tensor([row.ids for row in rows])
    weights = torch.tensor([row.weights for row in rows])
    return ids, weights


def _row(writer: TaskWriter, phase: Phase, rng: random.Random, length: int) -> Document:
    kinds = (writer.repeated, writer.passkey, writer.lookup, writer.tracking, writer.text)
    shares = (phase.repeated, phase.passkey, phase.lookup, phase.tracking, phase.text)
    make = rng.choices(kinds, shares)[0]
    # Part of the retrieval rows are shorter than the window, so that short prompts stay in the diet.
    target = length if make == writer.repeated or rng.random() < 0.7 else rng.randint(100, length)
    row = make(target)
    if len(row.ids) < length:
        rest = writer.text(length - len(row.ids))
        row.ids += rest.ids
        row.weights += rest.weights
    return Document(row.ids[:length], row.weights[:length])


def weighted_loss(network: Network, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = network(ids[:, :-1])
    losses = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    weight = weights[:, 1:].flatten()
    return (losses * weight).sum() / weight.sum()


@torch.no_grad()
def answer_accuracy(network: Network, documents: list[Document], threshold: float) -> float:
    """Share of tokens of weight >= ``threshold`` that greedy decoding would get right, given what precedes them."""
    right = total = 0
    for document in documents:
        ids = torch.tensor([document.ids])
        with torch.autocast("cpu", dtype=torch.bfloat16):
            guess = network(ids[:, :-1]).argmax(-1)[0]
        asked = torch.tensor(document.weights[1:]) >= threshold
        right += int((guess[asked] == ids[0, 1:][asked]).sum())
        total += int(asked.sum())
    return right / max(1, total)


def export(network: Network, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the Hugging Face model folder: bf16 weights, config, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in network.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    bos, eos, pad = (token_id(tokenizer, token) for token in (BOS, END, PAD))
    config = network.config.to_hugging_face(bos, eos, pad)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    generation = {"bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", encoding="utf-8")
    save_tokenizer(tokenizer, folder, network.config.max_position_embeddings)


class Run:
    """One training run: network, optimiser, random generators and counters, as saved in a checkpoint."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.work: Path = arguments.work
        self.work.mkdir(parents=True, exist_ok=True)
        texts, _ = read_texts(arguments.text, arguments.hold_out)
        path = self.work / "tokenizer.json"
        if not path.exists():
            train_tokenizer(texts, NetworkConfig().vocab_size).save(str(path))
        self.tokenizer = Tokenizer.from_file(str(path))
        filler: list[int] = []
        for text in texts:
            for encoding in self.tokenizer.encode_batch(text.split("\n\n"), add_special_tokens=False):
                filler += [*encoding.ids, *self.tokenizer.encode("\n\n", add_special_tokens=False).ids]
        self.rng = random.Random(arguments.seed)
        symbols = byte_token_ids(self.tokenizer)[:SYMBOLS]
        self.writer = TaskWriter(self.tokenizer, filler, symbols, self.rng)
        torch.manual_seed(arguments.seed)
        self.network = Network(NetworkConfig())
        matrices = [p for p in self.network.parameters() if p.ndim > 1]
        vectors = [p for p in self.network.parameters() if p.ndim == 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices, "weight_decay": 0.02}, {"params": vectors, "weight_decay": 0.0}],
            lr=PEAK_RATE,
            betas=(0.9, 0.98),
        )
        self.step, self.seconds = 0, 0.0
        self.checkpoint = self.work / "checkpoint.pt"
        if self.checkpoint.exists():
            self._restore()

    def _restore(self) -> None:
        # Our own file, written below; weights_only keeps it from running anything.
        saved = torch.load(self.checkpoint, weights_only=True)
        self.network.load_state_dict(saved["network"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.step, self.seconds = saved["step"], saved["seconds"]
        self.rng.seed(saved["seed"])

    def save(self) -> None:
        seed = self.rng.getrandbits(63)
        self.rng.seed(seed)
        state = {
            "network": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "seconds": self.seconds,
            "seed": seed,
        }
        fresh = self.checkpoint.with_suffix(".new")
        torch.save(state, fresh)
        fresh.replace(self.checkpoint)

    def train(self, total_steps: int, report_every: int = 30) -> None:
        """Run to ``total_steps``; one line and one checkpoint every ``report_every`` steps."""
        while self.step < total_steps:
            started = time.monotonic()
            phase = phase_at(self.step * TOKENS_PER_STEP)
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, total_steps)
            ids, weights = make_batch(self.writer, phase, self.rng)
            loss = weighted_loss(self.network, ids, weights)
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
            self.optimizer.step()
            self.step += 1
            self.seconds += time.monotonic() - started
            if self.step % report_every == 0 or self.step == total_steps:
                self._report(float(loss), phase)
                self.save()

    def _report(self, loss: float, phase: Phase) -> None:
        copied = answer_accuracy(self.network, [self.writer.repeated(128) for _ in range(8)], 1.0)
        keys = answer_accuracy(self.network, [self.writer.passkey(phase.length, needles=1) for _ in range(12)], 4.0)
        looked = answer_accuracy(self.network, [self.writer.lookup(phase.length) for _ in range(4)], 4.0)
        tokens = self.step * TOKENS_PER_STEP
        line = {
            "step": self.step,
            "tokens": tokens,
            "seconds": round(self.seconds),
            "length": phase.length,
            "loss": round(loss, 3),
            "copy": round(copied, 3),
            "passkey_digits": round(keys, 3),
            "lookup_digits": round(looked, 3),
            "tokens_per_s": round(tokens / self.seconds),
        }
        with (self.work / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, required=True, help="folder of .txt or .txt.gz files")
    parser.add_argument("--hold-out", default="austen_pride_and_prejudice", help="file name prefix kept for judging")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoint, tokenizer and log")
    parser.add_argument("--out", type=Path, help="write the model folder here at the end (default WORK/model)")
    parser.add_argument("--tokens", type=float, default=15e6, help="training tokens in all")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    run = Run(arguments)
    run.train(int(arguments.tokens) // TOKENS_PER_STEP)
    export(run.network, run.tokenizer, arguments.out or run.work / "model")


if __name__ == "__main__":
    main()
