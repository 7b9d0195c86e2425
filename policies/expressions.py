"""Conditions of rules: a small arithmetic over observed figures that knows "unknown". Nothing is run as code.

Grammar (Python's own, parsed with :mod:`ast` and restricted to these): figures by name, knobs by name, numbers, text
(knob values), ``+ - * /``, ``< <= > >= == != in``, chained comparisons, ``and or not``, ``min max abs``,
``rank(knob)`` (position of the knob's value in its declared order, 0 the mildest) and ``known(name)``.

Anything computed from an unknown figure is unknown (None). Logic is Kleene's: ``unknown or true`` is true, ``unknown
and false`` is false, else unknown. A condition holds only when it is true.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from engine.tunables import TUNABLES, TunableValue
from envs.features import FEATURES
from envs.spaces import Observation

Value = float | str | bool | None
Evaluator = Callable[[Observation], Value]

_FIGURES: Final = frozenset(feature.name for feature in FEATURES)
_UNITS: Final[Mapping[str, str]] = {feature.name: feature.unit for feature in FEATURES}
_ARITHMETIC: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_ORDER: Final[Mapping[type[ast.cmpop], Callable[[float, float], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}
_FUNCTIONS: Final[Mapping[str, Callable[..., float]]] = {"min": min, "max": max, "abs": abs}
_MAX_LENGTH: Final = 1000


class ExpressionError(ValueError):
    """The text is not a condition of this grammar; one line that says what is wrong."""


@dataclass(frozen=True)
class Condition:
    """A parsed condition. ``names``: the figures and knobs that it reads, in order of appearance."""

    text: str
    names: tuple[str, ...]
    evaluate: Evaluator = field(compare=False)  # the text says it all

    def holds(self, observation: Observation) -> bool:
        """True only when the condition is known to be true."""
        return self.evaluate(observation) is True

    def seen(self, observation: Observation) -> str:
        """The figures that it reads as they are now: ``kv_usage 0.93, waiting 7 requests``."""
        return ", ".join(f"{name} {show(name, observation)}" for name in self.names)


def show(name: str, observation: Observation) -> str:
    """A figure or knob for people, with its unit."""
    value = observation.tunables.get(name) if name in TUNABLES else observation.values.get(name)
    if value is None:
        return "unknown"
    text = (
        f"{value:.3g}"
        if isinstance(value, float) and abs(value) < 1000
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
    return f"{text} {_UNITS[name]}" if _UNITS.get(name) else text


def parse_condition(text: object) -> Condition:
    """Compile a condition. Raises ExpressionError for text outside the grammar, unknown names, impossible values."""
    if isinstance(text, bool):
        return Condition(str(text).lower(), (), lambda _: text)
    if not isinstance(text, str) or not text.strip():
        raise ExpressionError(f"expected a condition such as 'kv_usage > 0.8', got {text!r}")
    if len(text) > _MAX_LENGTH:
        raise ExpressionError(f"a condition may have {_MAX_LENGTH} characters, this one has {len(text)}")
    try:
        tree = ast.parse(" ".join(text.split()), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ExpressionError(f"not an expression: {text!r}") from None
    compiler = _Compiler()
    try:
        kind, evaluate = compiler.build(tree.body)
    except RecursionError:
        raise ExpressionError("nested too deeply") from None
    if kind != "truth":
        raise ExpressionError(f"{text!r} is a {kind}, not a condition; compare it with something")
    return Condition(text, tuple(compiler.names), evaluate)


class _Compiler:
    """Turns a syntax tree into closures, and finds out each part's kind: number, text or truth."""

    def __init__(self) -> None:
        self.names: dict[str, None] = {}

    def build(self, node: ast.expr) -> tuple[str, Evaluator]:
        match node:
            case ast.Constant(value=value):
                return self._constant(value)
            case ast.Name(id=name):
                return self._name(name)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                inner = self._number(operand)
                return "number", lambda o: None if (x := inner(o)) is None else -_float(x)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                truth = self._truth(operand)
                return "truth", lambda o: None if (x := truth(o)) is None else not x
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._arithmetic(_ARITHMETIC[type(op)], self._number(left), self._number(right))
            case ast.BoolOp(op=op, values=values):
                return self._logic([self._truth(value) for value in values], deciding=isinstance(op, ast.Or))
            case ast.Compare(left=left, ops=ops, comparators=rights):
                pairs = zip([left, *rights[:-1]], ops, rights, strict=True)
                return self._logic([self._compare(a, op, b) for a, op, b in pairs], deciding=False)
            case ast.Call(func=ast.Name(id=function), args=arguments, keywords=[]):
                return self._call(function, arguments)
        raise ExpressionError(f"not allowed in a condition: {ast.unparse(node)!r}")

    def _number(self, node: ast.expr) -> Evaluator:
        return self._of_kind(node, "number")

    def _truth(self, node: ast.expr) -> Evaluator:
        return self._of_kind(node, "truth")

    def _of_kind(self, node: ast.expr, wanted: str) -> Evaluator:
        kind, evaluate = self.build(node)
        if kind != wanted:
            raise ExpressionError(f"{ast.unparse(node)!r} is a {kind} where a {wanted} is needed")
        return evaluate

    @staticmethod
    def _constant(value: object) -> tuple[str, Evaluator]:
        if isinstance(value, str):
            return "text", lambda _: value
        if isinstance(value, bool):
            return "truth", lambda _: value
        if isinstance(value, int | float) and abs(value) < 1e300:
            constant = float(value)
            return "number", lambda _: constant
        raise ExpressionError(f"not a number or text: {value!r}")

    def _name(self, name: str) -> tuple[str, Evaluator]:
        self._check_name(name)
        self.names.setdefault(name)
        if name in _FIGURES:
            return "number", lambda o: None if (x := o.values.get(name)) is None else float(x)
        kind = "text" if isinstance(TUNABLES[name].default, str) else "number"
        if kind == "text":
            return kind, lambda o: o.tunables.get(name)
        return kind, lambda o: None if (x := o.tunables.get(name)) is None else float(x)

    @staticmethod
    def _check_name(name: str) -> None:
        if name not in _FIGURES and name not in TUNABLES:
            raise ExpressionError(f"unknown name {name!r}; known: {', '.join([*sorted(_FIGURES), *TUNABLES])}")

    @staticmethod
    def _arithmetic(
        function: Callable[[float, float], float], left: Evaluator, right: Evaluator
    ) -> tuple[str, Evaluator]:
        def evaluate(observation: Observation) -> Value:
            a, b = left(observation), right(observation)
            if a is None or b is None:
                return None
            try:
                result = function(_float(a), _float(b))
            except (ZeroDivisionError, OverflowError):
                return None
            return result if math.isfinite(result) else None

        return "number", evaluate

    @staticmethod
    def _logic(parts: list[Evaluator], *, deciding: bool) -> tuple[str, Evaluator]:
        """``or`` when one true part decides, ``and`` when one false part does."""

        def evaluate(observation: Observation) -> Value:
            values = [part(observation) for part in parts]
            if deciding in values:
                return deciding
            return None if None in values else not deciding

        return "truth", evaluate

    def _compare(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Evaluator:
        if isinstance(op, ast.In | ast.NotIn):
            if not isinstance(right, ast.List | ast.Tuple):
                raise ExpressionError(f"'in' needs a list of values, got {ast.unparse(right)!r}")
            equal = [self._compare(left, ast.Eq(), element) for element in right.elts]
            _, found = self._logic(equal, deciding=True)
            if isinstance(op, ast.In):
                return found
            return lambda o: None if (x := found(o)) is None else not x
        if type(op) not in _ORDER:
            raise ExpressionError(f"comparison not allowed in {ast.unparse(left)!r} ... {ast.unparse(right)!r}")
        (kind, a), (other, b) = self.build(left), self.build(right)
        if kind != other or kind == "truth":
            raise ExpressionError(
                f"cannot compare {ast.unparse(left)!r} ({kind}) with {ast.unparse(right)!r} ({other})"
            )
        if kind == "text" and not isinstance(op, ast.Eq | ast.NotEq):
            raise ExpressionError(f"text has no order; write rank({ast.unparse(left)}) to compare positions")
        for one, two in ((left, right), (right, left)):
            self._check_value(one, two)
        function = _ORDER[type(op)]

        def evaluate(observation: Observation) -> Value:
            x, y = a(observation), b(observation)
            return None if x is None or y is None else function(x, y)  # type: ignore[arg-type]

        return evaluate

    @staticmethod
    def _check_value(knob: ast.expr, value: ast.expr) -> None:
        """A knob compared with text that it can never be is a slip of the pen."""
        if isinstance(knob, ast.Name) and knob.id in TUNABLES and isinstance(value, ast.Constant):
            allowed: tuple[TunableValue, ...] = TUNABLES[knob.id].values
            if isinstance(value.value, str) and value.value not in allowed:
                raise ExpressionError(f"{knob.id} is never {value.value!r}; its values: {', '.join(map(str, allowed))}")

    def _call(self, function: str, arguments: list[ast.expr]) -> tuple[str, Evaluator]:
        if function in {"known", "rank"}:
            if len(arguments) != 1 or not isinstance(arguments[0], ast.Name):
                raise ExpressionError(f"{function}() takes one name")
            return self._known(arguments[0].id) if function == "known" else self._rank(arguments[0].id)
        if function not in _FUNCTIONS:
            raise ExpressionError(f"unknown function {function!r}; there are known, rank, {', '.join(_FUNCTIONS)}")
        parts = [self._number(argument) for argument in arguments]
        if len(parts) < 1 or (len(parts) != 1) == (function == "abs"):
            raise ExpressionError(f"{function}() takes {'one number' if function == 'abs' else 'two numbers or more'}")
        combine = _FUNCTIONS[function]

        def evaluate(observation: Observation) -> Value:
            values = [part(observation) for part in parts]
            return None if None in values else combine(*values)

        return "number", evaluate

    def _known(self, name: str) -> tuple[str, Evaluator]:
        self._check_name(name)
        self.names.setdefault(name)
        if name in _FIGURES:
            return "truth", lambda o: o.values.get(name) is not None
        return "truth", lambda o: name in o.tunables

    def _rank(self, knob: str) -> tuple[str, Evaluator]:
        if knob not in TUNABLES:
            raise ExpressionError(f"rank() takes a knob ({', '.join(TUNABLES)}), got {knob!r}")
        self.names.setdefault(knob)
        values = TUNABLES[knob].values
        return "number", lambda o: float(values.index(o.tunables[knob])) if o.tunables.get(knob) in values else None


def _float(value: Value) -> float:
    assert isinstance(value, float)  # noqa: S101  # kinds were checked when compiling
    return value
