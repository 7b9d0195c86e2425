"""Asks a Prometheus server for series: instant queries over its HTTP API."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self

import httpx

from engine.json_text import load_json
from engine.text import one_line, trouble

_MOST_SAID: Final = 300


class PrometheusError(Exception):
    """Prometheus cannot be asked, or refused; one line."""


@dataclass(frozen=True)
class Series:
    """Labels (the name is ``__name__``) and samples, times in seconds of the server's clock; NaN is left out."""

    labels: Mapping[str, str]
    samples: Sequence[tuple[float, float]]

    @property
    def name(self) -> str:
        return self.labels.get("__name__", "")

    @property
    def value(self) -> float | None:
        """The latest sample, None where it is unknown."""
        return self.samples[-1][1] if self.samples else None


class Prometheus:
    """Use it in ``with``. ``token``: sent as a bearer's, if given.

    Every method raises PrometheusError.
    """

    def __init__(self, url: str, *, timeout_s: float = 10.0, token: str | None = None) -> None:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        base = url.rstrip("/").removesuffix("/api/v1")
        if not base.startswith(("http://", "https://")):
            raise PrometheusError(f"{url[:100]!r}: must be an http address such as http://127.0.0.1:9090")
        self.url = base
        try:
            self._client = httpx.Client(base_url=f"{base}/api/v1/", timeout=timeout_s, headers=headers)
        except (httpx.InvalidURL, ValueError) as error:
            raise PrometheusError(f"{url[:100]!r} is no address: {error}") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def instant(self, query: str) -> list[Series]:
        """What a query gives now."""
        return [Series(row["metric"], _samples([row["value"]])) for row in self._ask(query, "vector")]

    def samples(self, selector: str) -> list[Series]:
        """All samples that a selector with a range, ``name[1h]``, gives, as they were scraped."""
        return [Series(row["metric"], _samples(row["values"])) for row in self._ask(selector, "matrix")]

    def now_s(self) -> float:
        """The server's clock."""
        value = self._data("time()").get("result")
        try:
            now = _samples([value])
        except PrometheusError:
            now = []
        if not now or not math.isfinite(now[0][1]):
            raise PrometheusError(f"{self.url}: is this a Prometheus? It does not tell its time")
        return now[0][1]

    def _ask(self, query: str, kind: str) -> list[dict[str, Any]]:
        data = self._data(query)
        rows = data.get("result")
        if data.get("resultType") != kind or not isinstance(rows, list):
            raise PrometheusError(f"{self.url}: is this a Prometheus? It answered something else than a {kind}")
        field = "value" if kind == "vector" else "values"
        if not all(isinstance(row, dict) and _has_labels(row) and field in row for row in rows):
            raise PrometheusError(f"{self.url}: is this a Prometheus? It answered series without samples")
        return rows

    def _data(self, query: str) -> dict[str, Any]:
        try:
            answer = self._client.post("query", data={"query": query})
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PrometheusError(f"{self.url}: no Prometheus answers ({trouble(error)})") from error
        try:
            body = load_json(answer.content)
        except ValueError as error:
            raise PrometheusError(
                f"{self.url}: status {answer.status_code} and no JSON; is this a Prometheus?"
            ) from error
        if not isinstance(body, dict) or body.get("status") != "success" or not isinstance(body.get("data"), dict):
            said = str(body.get("error", "")) if isinstance(body, dict) else ""
            raise PrometheusError(f"{self.url}: status {answer.status_code} {one_line(said, _MOST_SAID)}".rstrip())
        found: dict[str, Any] = body["data"]
        return found


def _has_labels(row: Mapping[str, Any]) -> bool:
    labels = row.get("metric")
    return isinstance(labels, dict) and all(isinstance(text, str) for text in labels.values())


def _samples(pairs: Sequence[Any]) -> list[tuple[float, float]]:
    """Times and values as floats. Raises PrometheusError for something else."""
    try:
        known = [(float(at), float(value)) for at, value in pairs]
    except (ArithmeticError, TypeError, ValueError) as error:
        raise PrometheusError(one_line(f"samples that are no numbers: {error}")) from error
    return [(at, value) for at, value in known if math.isfinite(at) and not math.isnan(value)]
