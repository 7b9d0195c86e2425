"""A Prometheus page taken apart: samples by name, and who of several engines on it each belongs to."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

MOST_BYTES = 8 * 2**20
"""Of a page; the largest seen is 0.1 MB."""


class Sample(NamedTuple):
    labels: Mapping[str, str]
    value: float


class Page:
    """Samples of one page. A value that is no number is left out: it is unknown."""

    def __init__(self, text: str) -> None:
        """Raises ValueError for what is no page."""
        self._samples: dict[str, list[Sample]] = {}
        try:
            self._read(text)
        except (ArithmeticError, AttributeError, LookupError, TypeError) as error:  # the parser's, for some texts
            raise ValueError(f"not a Prometheus page: {error!r}") from error

    def _read(self, text: str) -> None:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                value = float(sample.value)
                if math.isfinite(value):
                    self._samples.setdefault(sample.name, []).append(Sample(sample.labels, value))

    def has_prefix(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self._samples)

    def samples(self, name: str) -> Sequence[Sample]:
        """All samples of a name, none for one that is not on the page."""
        return self._samples.get(name, ())

    def labels(self, key: str, prefix: str) -> list[str]:
        """The values of a label over all samples whose name has the prefix, in order of the page."""
        found: dict[str, None] = {}
        for name, samples in self._samples.items():
            if name.startswith(prefix):
                found.update((sample.labels[key], None) for sample in samples if key in sample.labels)
        return list(found)

    def one(self, name: str) -> float | None:
        """The value of a sample that the whole page has once."""
        samples = self.samples(name)
        return samples[0].value if len(samples) == 1 else None


class View:
    """A page as one engine of it sees it: the samples with its label. Where it is the only one, also those that name no
    engine; where there are several, nobody can say whose those are, and their figures are unknown.

    ``key``: the label that tells engines apart. ``only``: labels that must have a certain value where they are present,
    as copies by rank or shares by priority would count things twice.
    """

    def __init__(self, page: Page, key: str, engine: str, *, alone: bool, only: Mapping[str, str]) -> None:
        self._page, self._key, self._engine = page, key, engine
        self._alone, self._only = alone, only

    def samples(self, *names: str) -> Sequence[Sample]:
        """Of the first of the names that has any: names are one figure's, the newest first."""
        for name in names:
            mine = [sample for sample in self._page.samples(name) if self._is_mine(sample.labels)]
            if mine:
                return mine
        return ()

    def total(self, *names: str, **having: str) -> float | None:
        """The sum over all samples of the first name that has any; of those with the labels given. None without any."""
        found = [
            sample.value
            for sample in self.samples(*names)
            if all(sample.labels.get(key) == value for key, value in having.items())
        ]
        try:
            return math.fsum(found) if found else None
        except OverflowError:  # figures so large that nobody knows what they add up to
            return None

    def label(self, name: str, label: str) -> str | None:
        """A label of an information sample (``..._info 1``)."""
        return next((s.labels[label] for s in self.samples(name) if label in s.labels), None)

    def _is_mine(self, labels: Mapping[str, str]) -> bool:
        if (labels[self._key] != self._engine) if self._key in labels else not self._alone:
            return False
        return all(labels.get(key, value) == value for key, value in self._only.items())
