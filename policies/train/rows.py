"""What a run writes of itself: rows of metrics.jsonl, TensorBoard, and figures in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stable_baselines3.common.logger import Logger, configure

from engine.whole_file import write_whole
from policies.train.checkpoint import Progress
from policies.train.folder import METRICS, TENSORBOARD
from policies.train.judge import loss_per_token, mean


class Rows:
    """Rows of one run's file. ``logger``: gets the figures as well; the algorithm's own."""

    def __init__(self, folder: Path, logger: Logger) -> None:
        self._path, self._logger = folder / METRICS, logger

    def begun(self, progress: Progress, outcomes: list[dict[str, Any]]) -> dict[str, Any]:
        """A row of where the run is: of training, by the ``outcomes`` of its episodes, and of what was learned."""
        row: dict[str, Any] = {"steps": progress.steps, "seconds": round(progress.seconds, 1)}
        if outcomes:
            row["training"] = {**figures(outcomes), "price": progress.price}
            self._record("training", row["training"])
        losses = {k: v for k, v in self._logger.name_to_value.items() if k.startswith("train/")}
        row["learning"] = {name.removeprefix("train/"): float(value) for name, value in losses.items()}
        return row

    def judged(self, row: dict[str, Any], score: float, played: list[dict[str, Any]]) -> None:
        """Put a judgement into the row."""
        row["held_out"] = {"score": score, **figures(played)}
        self._record("held_out", row["held_out"])

    def write(self, row: dict[str, Any], progress: Progress) -> None:
        """Append a row, and count it. Raises OSError."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        progress.rows += 1

    def cut(self, progress: Progress) -> None:
        """Rows after the checkpoint come again."""
        if self._path.exists() and progress.rows:  # 0: by a version that did not count them
            lines = self._path.read_bytes().splitlines(keepends=True)
            write_whole(self._path, b"".join(lines[: progress.rows]))

    def _record(self, part: str, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._logger.record(f"{part}/{name}", value)


def figures(found: list[dict[str, Any]]) -> dict[str, float]:
    """Means over episodes."""
    plain = {name: mean(found, name) for name in ("reward", "goodput_rps", "changes")}
    return {**plain, "loss_per_token": loss_per_token(found)}


def said(found: list[dict[str, Any]]) -> str:
    """Means over episodes, in words."""
    means = figures(found)
    return (
        f"goodput {means['goodput_rps']:.4g}/s, loss {means['loss_per_token']:.2%} per token, "
        f"{means['changes']:.1f} changes an episode"
    )


def logger(folder: Path) -> Logger:
    """Writes for TensorBoard where that is installed, else nothing."""
    try:
        import tensorboard  # noqa: F401, PLC0415  # only whether it is there
    except ImportError:
        return configure(None, [])
    return configure(str(folder / TENSORBOARD), ["tensorboard"])
