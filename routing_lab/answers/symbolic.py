r"""Two syntax trees: equal, different, or not decided. Imports sympy, so only the worker imports it.

Three values, and "equal" is only ever a proof: numbers at test points can refute, never confirm.

1.  *Values* are subtracted. High-precision values at fixed generic points refute; then expansion, cancellation and
    ``simplify`` must bring the difference to zero. Variables are real. Where both sides are real at a point with
    negative coordinates they must agree there too, so ``\sqrt{x^2}`` is not ``x``; a proof for positive variables is
    enough where one side is not real for negative ones (``\sqrt[3]{x^2}`` and ``x^{2/3}``).
2.  *Equations* are equal when their differences of sides are proportional by a constant other than zero:
    ``2x+4y=3`` and ``y=3/4-x/2``. An equation between constants, or one that is always true, equals only itself.
    Inequalities likewise, with a positive constant after turning them to ``<`` or ``<=``.
3.  *A label is not part of a value*: ``x = 5``, ``f(x) = 2x`` and ``x \in S`` are compared by their right side when the
    other answer has no relation, except that ``y = 2x+1`` expected is not ``2x+1`` given: there the equation was asked.
4.  *Tuples and intervals* are ordered and keep their brackets. *Sets*, lists with ``or``/``and``, and unions are
    unordered, without repetition. A list with commas is ordered, except against a set; against a tuple it may lack the
    brackets. A set of one element equals the element. ``\pm`` stands for both signs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Final, Literal

import sympy

from routing_lab.answers.syntax import Node

__all__ = ["Answer", "compare"]

Answer = Literal["yes", "no", "undecided"]

_DIGITS: Final = 40
_TOLERANCE: Final = sympy.Float("1e-25", _DIGITS)
_POSITIVE_POINTS: Final = ((17, 13), (5, 7), (29, 19), (3, 11), (41, 31), (2, 23), (37, 43), (7, 47))
"""Numerators and denominators of the test values; no small relation holds between them."""
_FUNCTIONS: Final = {
    "sin": sympy.sin, "cos": sympy.cos, "tan": sympy.tan, "cot": sympy.cot, "sec": sympy.sec, "csc": sympy.csc,
    "arcsin": sympy.asin, "arccos": sympy.acos, "arctan": sympy.atan, "sinh": sympy.sinh, "cosh": sympy.cosh,
    "tanh": sympy.tanh, "exp": sympy.exp, "ln": sympy.log, "abs": sympy.Abs, "min": sympy.Min, "max": sympy.Max,
    "gcd": sympy.gcd, "lcm": sympy.lcm,
}  # fmt: skip
_CONSTANTS: Final = {"e": sympy.E, "i": sympy.I, "pi": sympy.pi, "oo": sympy.oo}
_UNNAMED_BASE: Final = sympy.Symbol("base", positive=True)
_UNORDERED: Final = ("set", "or", "union")


class _UndecidedError(Exception):
    """A value that cannot be built or has no meaning here, such as a division by zero."""


def compare(expected: Node, given: Node) -> Answer:
    """Decide whether two answers are equal.

    May take long or much memory, and may fail with whatever sympy fails with: the worker is killed or dies then, and
    its supervisor reads that as undecided.
    """
    if expected == given:
        return "yes"
    try:
        return _compare(_spread(expected), _spread(given))
    except (_UndecidedError, ZeroDivisionError, RecursionError):
        return "undecided"


# Shapes.


def _spread(node: Node) -> Node:
    r"""Replace ``\pm`` by the list of both signs; the same sign is taken everywhere in the answer."""
    if not _holds(node, "pm"):
        return node
    both = (_signed(node, "add"), _signed(node, "sub"))
    return Node("list", "or", both)


def _holds(node: Node, kind: str) -> bool:
    return node.kind == kind or any(_holds(part, kind) for part in node.parts)


def _signed(node: Node, sign: str) -> Node:
    parts = tuple(_signed(part, sign) for part in node.parts)
    if node.kind != "pm":
        return Node(node.kind, node.value, parts)
    left, right = parts
    return Node("add", "", (left, right if sign == "add" else Node("neg", "", (right,))))


def _compare(expected: Node, given: Node) -> Answer:
    expected, given = _without_labels(expected, given)
    shapes = (_shape(expected), _shape(given))
    if shapes[0] in _UNORDERED or shapes[1] in _UNORDERED:
        return _compare_unordered(expected, given, shapes)
    if "relation" in shapes or "chain" in shapes:
        return _compare_relations(expected, given) if shapes[0] == shapes[1] else "no"
    if "value" in shapes:
        return _compare_values(expected, given) if shapes[0] == shapes[1] else "no"
    if {"list", "tuple"} == set(shapes):
        brackets = expected.value if expected.kind == "tuple" else given.value
        return _all_equal(expected.parts, given.parts) if brackets == "()" else "no"
    same = shapes[0] == shapes[1] and (expected.kind == "list" or expected.value == given.value)
    return _all_equal(expected.parts, given.parts) if same else "no"


def _shape(node: Node) -> str:
    if node.kind == "list":
        return "or" if node.value == "or" else "list"
    return node.kind if node.kind in {"tuple", "set", "union", "relation", "chain", "matrix"} else "value"


def _without_labels(expected: Node, given: Node) -> tuple[Node, Node]:
    """Rule 3: take ``x =`` off where only one of the two answers has it."""
    wanted, had = _labelled(expected), _labelled(given)
    if had is not None and not _is_relation(expected) and wanted is None:
        return expected, had
    if wanted is not None and not _is_relation(given) and had is None and not _holds(wanted, "symbol"):
        return wanted, given
    if expected.kind == "degree" and given.kind == "degree":
        return expected.parts[0], given.parts[0]
    if expected.kind == "degree" or given.kind == "degree":
        # 90 and 90°: a unit, as everywhere at the end of an answer.
        return (node.parts[0] if node.kind == "degree" else node for node in (expected, given))  # type: ignore[return-value]
    return expected, given


def _labelled(node: Node) -> Node | None:
    """The right side of ``x = value``, ``f(x) = value``, ``x in set``; for a list, of all its items with one label."""
    if node.kind == "relation" and node.value in {"=", "in"}:
        left, right = node.parts
        if left.kind == "call" or (left.kind == "symbol" and left not in _atoms(right)):
            return right
    if node.kind == "list" and node.parts and all(part.kind == "relation" for part in node.parts):
        labels = {part.parts[0] for part in node.parts}
        sides = [_labelled(part) for part in node.parts]
        if len(labels) == 1 and all(side is not None for side in sides):
            return Node("list", node.value, tuple(side for side in sides if side is not None))
    return None


def _atoms(node: Node) -> set[Node]:
    return {node} if not node.parts else set().union(*(_atoms(part) for part in node.parts))


def _is_relation(node: Node) -> bool:
    return node.kind in {"relation", "chain"} or (
        node.kind == "list" and any(_is_relation(part) for part in node.parts)
    )


def _compare_unordered(expected: Node, given: Node, shapes: tuple[str, str]) -> Answer:
    if "tuple" in shapes and "union" not in shapes and "set" in shapes:
        return "no"
    if "union" in shapes and shapes != ("union", "union"):
        return "no"
    wanted, had = _members(expected), _members(given)
    found: list[Answer] = [_contains(had, member) for member in wanted]
    found += [_contains(wanted, member) for member in had]
    return _all(found)


def _members(node: Node) -> tuple[Node, ...]:
    return node.parts if node.kind in {"set", "list", "union"} else (node,)


def _contains(members: Sequence[Node], wanted: Node) -> Answer:
    answers = {_compare(member, wanted) for member in members}
    return "yes" if "yes" in answers else "undecided" if "undecided" in answers else "no"


def _all_equal(left: Sequence[Node], right: Sequence[Node]) -> Answer:
    if len(left) != len(right):
        return "no"
    return _all([_compare(*pair) for pair in zip(left, right, strict=True)])


def _all(answers: Sequence[Answer]) -> Answer:
    return "no" if "no" in answers else "undecided" if "undecided" in answers else "yes"


# Relations.


def _compare_relations(expected: Node, given: Node) -> Answer:
    if expected.kind == "chain":
        forward, backward = _all_equal(expected.parts, given.parts), _all_equal(expected.parts, given.parts[::-1])
        return "yes" if "yes" in {forward, backward} else "undecided" if "undecided" in {forward, backward} else "no"
    (label, side), (other_label, other_side) = expected.parts, given.parts
    if label == other_label and _shape(side) != "value":
        # D = (0, 1): a name for something that has no difference.
        return _compare(side, other_side) if expected.value == given.value else "no"
    (sign, left), (other_sign, right) = _turned(expected), _turned(given)
    if sign != other_sign or sign == "in":
        return "no"
    wanted, had = _build(left), _build(right)
    if not wanted.free_symbols or not had.free_symbols:
        return "no"
    return _proportional(wanted, had, positive=sign in {"<", "<="})


def _turned(relation: Node) -> tuple[str, Node]:
    """The sign turned to ``=``, ``!=``, ``<`` or ``<=``, and the difference of the sides."""
    sign, (left, right) = relation.value, relation.parts
    if sign in {">", ">="}:
        sign, left, right = sign.replace(">", "<"), right, left
    return sign, Node("add", "", (left, Node("neg", "", (right,))))


def _proportional(left: sympy.Expr, right: sympy.Expr, *, positive: bool) -> Answer:
    """Whether ``left / right`` is one constant, neither zero nor infinite (and above zero where asked)."""
    if "yes" in {_zero(left), _zero(right)}:
        return "no"
    ratio = sympy.cancel(sympy.together(left / right))
    if ratio.free_symbols:
        values = [value for point in _points(ratio, signs=False) if (value := _value_at(ratio, point)) is not None]
        if len(values) > 1 and any(_differ(values[0], value) for value in values[1:]):
            return "no"
        ratio = sympy.simplify(ratio)
    if ratio.free_symbols:
        return "undecided"
    if not ratio.is_finite or ratio.is_zero:
        return "no"
    return "yes" if not positive or ratio.is_positive else "no" if ratio.is_negative else "undecided"


# Values.


def _compare_values(expected: Node, given: Node) -> Answer:
    wanted, had = _build(expected), _build(given)
    if wanted == had:
        return "yes"
    if wanted.has(sympy.oo, -sympy.oo) or had.has(sympy.oo, -sympy.oo):
        return "no"
    if wanted.is_Rational and had.is_Rational:
        return "no"
    if _refuted(wanted, had):
        return "no"
    return _zero(wanted - had)


def _refuted(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether a test point tells the two apart."""
    for point in _points(left + right, signs=False):
        values = _value_at(left, point), _value_at(right, point)
        if values[0] is not None and values[1] is not None and _differ(values[0], values[1]):
            return True
    for point in _points(left + right, signs=True):
        values = _value_at(left, point), _value_at(right, point)
        if values[0] is None or values[1] is None or not (values[0].is_real and values[1].is_real):
            continue
        if _differ(values[0], values[1]):
            return True
    return False


def _points(expression: sympy.Expr, *, signs: bool) -> list[dict[sympy.Symbol, sympy.Rational]]:
    """Two generic points for the variables of an expression; with ``signs``, some or all coordinates negative."""
    symbols = sorted(expression.free_symbols, key=lambda symbol: symbol.name)
    if not symbols:
        return [] if signs else [{}]
    points = []
    for shift in (0, 3):
        point = {}
        for index, symbol in enumerate(symbols):
            over, under = _POSITIVE_POINTS[(index + shift) % len(_POSITIVE_POINTS)]
            value = sympy.Rational(over, under) + index // len(_POSITIVE_POINTS)
            flip = signs and symbol != _UNNAMED_BASE and (shift == 0 or index % 2 == 0)
            point[symbol] = -value if flip else value
        points.append(point)
    return points


def _value_at(expression: sympy.Expr, point: dict[sympy.Symbol, sympy.Rational]) -> sympy.Expr | None:
    """A finite number with ``_DIGITS`` digits, or ``None`` where sympy does not reach one."""
    value = expression.subs(point).evalf(_DIGITS)
    if not value.is_number or not value.is_finite or value.has(sympy.nan, sympy.zoo):
        return None
    parts = value.as_real_imag()
    return value if all(part.is_Float or part.is_Rational for part in parts) else None


def _differ(left: sympy.Expr, right: sympy.Expr) -> bool:
    """Whether two high-precision values differ by more than rounding explains, relative to their size."""
    distance, size = abs(left - right), max(abs(left), abs(right))
    return bool(distance > size * _TOLERANCE)


def _zero(difference: sympy.Expr) -> Answer:
    """Prove that a difference is zero or that it is not; the cheap ways first."""
    for step in (lambda it: it, sympy.expand, lambda it: sympy.cancel(sympy.together(it)), sympy.simplify):
        reduced = step(difference)
        if reduced.is_zero:
            return "yes"
    if difference.free_symbols:
        if _value_differs_from_zero(difference):
            return "no"
        positive = {symbol: sympy.Symbol(symbol.name, positive=True) for symbol in difference.free_symbols}
        return "yes" if sympy.simplify(difference.subs(positive)).is_zero else "undecided"
    reduced = sympy.simplify(sympy.expand(sympy.radsimp(sympy.sqrtdenest(difference)), trig=True))
    if reduced.is_zero or difference.equals(0):
        return "yes"
    return "no" if reduced.is_zero is False else "undecided"


def _value_differs_from_zero(expression: sympy.Expr) -> bool:
    values = [_value_at(expression, point) for point in _points(expression, signs=False)]
    return any(value is not None and abs(value) > _TOLERANCE for value in values)


def _build(node: Node) -> sympy.Expr:
    """Make the sympy expression of a value; nothing in it comes from a string but checked digits and names."""
    parts = [_build(part) for part in node.parts]
    if node.kind == "number":
        return sympy.Rational(node.value)
    if node.kind == "symbol":
        return sympy.Symbol(node.value, real=True)
    if node.kind == "constant":
        return _CONSTANTS[node.value]
    if node.kind == "function":
        return _function(node.value, parts)
    if node.kind == "call":
        return sympy.Function(node.value)(*parts)
    if node.kind not in _OPERATIONS:
        raise _UndecidedError  # a set inside a sum, a relation inside a root
    built = _OPERATIONS[node.kind](*parts)
    if built.has(sympy.nan, sympy.zoo):
        raise _UndecidedError
    return built


_OPERATIONS: Final[dict[str, Callable[..., sympy.Expr]]] = {
    "add": operator.add,
    "neg": operator.neg,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "root": lambda radicand, index=2: sympy.root(radicand, index),
    "factorial": sympy.factorial,
    "binomial": sympy.binomial,
    "degree": lambda angle: angle * sympy.pi / 180,
}


def _function(name: str, parts: list[sympy.Expr]) -> sympy.Expr:
    if name == "log10":
        return sympy.log(parts[0]) / sympy.log(10)
    if name == "log":
        base = parts[1] if len(parts) > 1 else _UNNAMED_BASE
        return sympy.log(parts[0]) / sympy.log(base)
    return _FUNCTIONS[name](*parts)
