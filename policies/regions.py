"""Where a condition can hold: boxes over figures and knobs, found by interval reasoning. Nothing is evaluated.

A box gives every name an interval (figures) or a set of values (knobs). :func:`where` returns boxes that together hold
every point at which a condition is true (or false), and perhaps a little more where two figures meet in one comparison.
So an empty answer is a proof, any other a possibility. Figures are taken as known, except where ``known()`` asks.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from engine.tunables import TUNABLES, TunableValue
from envs.features import FEATURES

_MOST_BOXES: Final = 512


@dataclass(frozen=True)
class Span:
    """Numbers from ``low`` to ``high``; an open end does not belong to it."""

    low: float
    high: float
    low_open: bool = False
    high_open: bool = False

    @property
    def is_empty(self) -> bool:
        return self.low > self.high or (self.low == self.high and (self.low_open or self.high_open))

    def meet(self, other: Span) -> Span:
        """What both hold."""
        low, low_open = max((self.low, self.low_open), (other.low, other.low_open))
        high, high_closed = min((self.high, not self.high_open), (other.high, not other.high_open))
        return Span(low, high, low_open, not high_closed)

    @property
    def closed(self) -> Span:
        return Span(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}"


Domain = Span | frozenset[TunableValue]
Box = Mapping[str, Domain]


def whole() -> dict[str, Domain]:
    """Every figure inside its declared bounds, every knob at any of its values."""
    spans: dict[str, Domain] = {feature.name: Span(feature.low, feature.high) for feature in FEATURES}
    return spans | {name: frozenset(knob.values) for name, knob in TUNABLES.items()}


def where(text: str, *, holds: bool = True, within: Sequence[Box] | None = None) -> list[Box]:
    """Boxes in which a condition (of :mod:`policies.expressions`, parsed there before) is true, or false."""
    node = ast.parse(" ".join(text.split()), mode="eval").body
    boxes: list[Box] = [whole()] if within is None else list(within)
    return [found for box in boxes for found in _solve(node, holds, box)]


def touches(one: Box, other: Box) -> bool:
    """Whether two boxes have a point in common when their edges are counted in."""
    for name, domain in one.items():
        there = other[name]
        if isinstance(domain, Span) and isinstance(there, Span):
            if domain.closed.meet(there.closed).is_empty:
                return False
        elif not (domain & there):  # type: ignore[operator]  # both are sets of values
            return False
    return True


def describe(box: Box) -> str:
    """What a box restricts, for people: ``load 0.3 to 0.8``."""
    everything = whole()
    parts = [
        f"{name} {domain}" if isinstance(domain, Span) else f"{name} in {', '.join(sorted(map(str, domain)))}"
        for name, domain in box.items()
        if domain != everything[name]
    ]
    return ", ".join(parts) or "everywhere"


def _solve(node: ast.expr, want: bool, box: Box) -> list[Box]:
    match node:
        case ast.Constant(value=bool(value)):
            return [box] if value is want else []
        case ast.Name(id="true" | "false" as word):  # a bare truth of the rule file
            return [box] if (word == "true") is want else []
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return _solve(operand, not want, box)
        case ast.BoolOp(op=op, values=values):
            if isinstance(op, ast.And) is want:
                return _all([(value, want) for value in values], box)
            return _merged([found for value in values for found in _solve(value, want, box)])
        case ast.Compare(left=left, ops=ops, comparators=rights) if len(ops) > 1:
            pairs = zip([left, *rights[:-1]], ops, rights, strict=True)
            parts: list[ast.expr] = [ast.Compare(a, [op], [b]) for a, op, b in pairs]
            return _solve(ast.BoolOp(ast.And(), parts), want, box)
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.List | ast.Tuple):
                found: list[ast.expr] = [ast.Compare(left, [ast.Eq()], [element]) for element in right.elts]
                return _solve(ast.BoolOp(ast.Or(), found), want is isinstance(op, ast.In), box)
            return _compare(left, op if want else _OPPOSITE[type(op)](), right, box)
    return [box]  # known(): a figure may be known or not


def _all(parts: Sequence[tuple[ast.expr, bool]], box: Box) -> list[Box]:
    boxes: list[Box] = [box]
    for node, want in parts:
        boxes = _merged([found for one in boxes for found in _solve(node, want, one)])
    return boxes


def _merged(boxes: list[Box]) -> list[Box]:
    """Each once. Raises ValueError where there are very many: rules are small."""
    unique: list[Box] = []
    for box in boxes:
        if box not in unique:
            unique.append(box)
    if len(unique) > _MOST_BOXES:
        raise ValueError("a condition of this rule has too many alternatives to reason about")
    return unique


_OPPOSITE: Final[Mapping[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip
_MIRRORED: Final[Mapping[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.Gt, ast.Gt: ast.Lt, ast.LtE: ast.GtE, ast.GtE: ast.LtE, ast.Eq: ast.Eq, ast.NotEq: ast.NotEq,
}  # fmt: skip


def _compare(left: ast.expr, op: ast.cmpop, right: ast.expr, box: Box) -> list[Box]:
    for knob, other, way in ((left, right, op), (right, left, _MIRRORED[type(op)]())):
        values = _knob_values(knob, box)
        if values is not None:
            constant = _constant(other, box)
            if constant is not None:
                name, numbers = values
                kept = frozenset(v for v, n in numbers.items() if _test(way, n, constant))
                return [{**box, name: kept}] if kept else []
    a, b = _range(left, box), _range(right, box)
    if a is None or b is None:
        return [box]
    found: dict[str, Domain] = dict(box)
    for node, own, opposite, way in ((left, a, b, op), (right, b, a, _MIRRORED[type(op)]())):
        cut = _cut(own, way, opposite)
        if cut.is_empty:
            return []
        if isinstance(node, ast.Name) and isinstance(box.get(node.id), Span):
            found[node.id] = cut
    if isinstance(op, ast.NotEq) and a == b and a.low == a.high:
        return []
    return [found]


def _cut(span: Span, op: ast.cmpop, other: Span) -> Span:
    """What of ``span`` can compare so with some number of ``other``."""
    match op:
        case ast.Lt():
            return span.meet(Span(-math.inf, other.high, high_open=True))
        case ast.LtE():
            return span.meet(Span(-math.inf, other.high, high_open=other.high_open))
        case ast.Gt():
            return span.meet(Span(other.low, math.inf, low_open=True))
        case ast.GtE():
            return span.meet(Span(other.low, math.inf, low_open=other.low_open))
        case ast.Eq():
            return span.meet(other)
        case ast.NotEq() if other.low == other.high:
            # An end that is excluded opens; a point in the middle does not split the interval.
            return Span(
                span.low, span.high, span.low_open or span.low == other.low, span.high_open or span.high == other.high
            )
    return span


def _knob_values(node: ast.expr, box: Box) -> tuple[str, dict[TunableValue, TunableValue | float]] | None:
    """A knob or its rank: by possible value, what is compared."""
    match node:
        case ast.Name(id=name) if name in TUNABLES:
            return name, {value: value for value in _values(box, name)}
        case ast.Call(func=ast.Name(id="rank"), args=[ast.Name(id=name)]):
            order = TUNABLES[name].values
            return name, {value: float(order.index(value)) for value in _values(box, name)}
    return None


def _values(box: Box, name: str) -> frozenset[TunableValue]:
    domain = box[name]
    assert not isinstance(domain, Span)  # noqa: S101  # knobs have sets
    return domain


def _constant(node: ast.expr, box: Box) -> TunableValue | float | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    span = _range(node, box)
    return span.low if span is not None and span.low == span.high else None


def _test(op: ast.cmpop, left: TunableValue | float, right: TunableValue | float) -> bool:
    if isinstance(left, str) or isinstance(right, str):
        return (left == right) is isinstance(op, ast.Eq)
    tests: dict[type[ast.cmpop], bool] = {
        ast.Lt: left < right, ast.LtE: left <= right, ast.Gt: left > right, ast.GtE: left >= right,
        ast.Eq: left == right, ast.NotEq: left != right,
    }  # fmt: skip
    return tests[type(op)]


def _range(node: ast.expr, box: Box) -> Span | None:
    """Between which numbers an expression lies; None for text."""
    match node:
        case ast.Constant(value=int() | float() as value):
            return Span(float(value), float(value))
        case ast.Name(id=name):
            domain = box[name]
            if isinstance(domain, Span):
                return domain
            numbers = [float(value) for value in domain if not isinstance(value, str)]
            return Span(min(numbers), max(numbers)) if numbers else None
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            inner = _range(operand, box)
            return None if inner is None else Span(-inner.high, -inner.low, inner.high_open, inner.low_open)
        case ast.BinOp(left=left, op=op, right=right):
            a, b = _range(left, box), _range(right, box)
            return None if a is None or b is None else _arithmetic(op, a, b)
        case ast.Call(func=ast.Name(id="rank"), args=[ast.Name(id=name)]):
            ranks = [float(TUNABLES[name].values.index(value)) for value in _values(box, name)]
            return Span(min(ranks), max(ranks))
        case ast.Call(func=ast.Name(id=function), args=arguments):
            parts = [part for part in (_range(argument, box) for argument in arguments) if part is not None]
            if len(parts) == len(arguments):
                return _call(function, parts)
    return None


def _arithmetic(op: ast.operator, a: Span, b: Span) -> Span:
    """Edges count as included: a possibility more, never one less."""
    if isinstance(op, ast.Add):
        return Span(a.low + b.low, a.high + b.high)
    if isinstance(op, ast.Sub):
        return Span(a.low - b.high, a.high - b.low)
    if isinstance(op, ast.Mult):
        return _hull([x * y for x in (a.low, a.high) for y in (b.low, b.high)])
    if b.low <= 0 <= b.high:
        return Span(-math.inf, math.inf)
    return _hull([x / y for x in (a.low, a.high) for y in (b.low, b.high)])


def _call(function: str, parts: Sequence[Span]) -> Span:
    if function == "abs":
        span = parts[0]
        ends = (abs(span.low), abs(span.high))
        return Span(0.0 if span.low <= 0 <= span.high else min(ends), max(ends))
    combine: Callable[..., float] = min if function == "min" else max
    return Span(combine(part.low for part in parts), combine(part.high for part in parts))


def _hull(numbers: Sequence[float]) -> Span:
    known = [0.0 if math.isnan(number) else number for number in numbers]
    return Span(min(known), max(known))
