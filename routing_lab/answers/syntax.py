r"""From the text of an expression to a bounded syntax tree: a tokenizer and a recursive-descent parser, without sympy.

Nothing is evaluated and no name is looked up anywhere but in the tables below, so there is nothing to execute: the text
``__import__('os')`` has no parse. Length, tokens, nesting, items, digits, exponents and factorials are bounded here,
*before* sympy sees anything.

Why not ``math-verify`` or ``latex2sympy2-extended`` inside the worker: their grammar goes on after what it does not
understand, so a damaged answer becomes a shorter right one (tried with math-verify 0.9.0: ``Answer: 12\sqrt(2)`` equals
12, huggingface/Math-Verify#41; ``1+1=2`` equals ``3=3``; ``1/199!`` equals ``1/200!``, #14), and powers are evaluated
while parsing (the fraction of #65 still does not end by its time limit, which is a signal and raises in any thread
but the main one, #50). A gate needs the opposite: what is not understood completely is refused.
``benchmarks/answers_throughput.py`` lists every disagreement. sympy's own ``sympify`` and ``parse_expr`` end in
``eval`` (sympy/sympy#10805).

What is read (anything else is ``not_an_expression``): LaTeX and plain notation for rational numbers, one-letter and
Greek variables with subscripts, ``e``, ``i``, ``\pi``, ``\infty``; ``+ - * / ^ ! %``, fractions, roots, absolute
values, binomials, elementary functions, implicit products; relations and chains of them; tuples, intervals and their
unions, sets, lists with commas, ``and`` or ``or``; ``\pm``; matrices.

Decisions where notation is ambiguous: ``2\frac{1}{2}`` and ``2 1/2`` are mixed numbers; ``1/2x`` is read from left to
right; ``x^23`` has the exponent 23; ``log`` has an unnamed base, which is neither ``ln`` nor 10; ``1,234`` is a number
outside brackets and two items inside; ``f(x)`` is an application for f, g and h and a product for every other letter.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from routing_lab.answers.judgement import Reason
from routing_lab.answers.limits import (
    MAX_EXPONENT,
    MAX_EXPRESSION_CHARS,
    MAX_FACTORIAL,
    MAX_ITEMS,
    MAX_NESTING,
    MAX_POWER_BITS,
)
from routing_lab.answers.tokens import (
    APPLIED,
    RELATIONS,
    SEVERAL_ARGUMENTS,
    ExpressionTooLargeError,
    NotAnExpressionError,
    Token,
    math_part,
    tokenize,
)

__all__ = ["Node", "parse"]


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the tree: its kind, its own text (a number, a name, an operator), and what stands below it."""

    kind: str
    value: str = ""
    parts: tuple[Node, ...] = ()


def parse(text: str) -> Node | Reason:
    """Parse an expression.

    Returns:
        The tree; or ``Reason.TOO_LARGE``, ``Reason.NOT_AN_EXPRESSION``. Never raises.
    """
    text = math_part(text)
    if len(text) > MAX_EXPRESSION_CHARS:
        return Reason.TOO_LARGE
    try:
        tree = _Parser(tokenize(text)).whole()
        _check_sizes(tree)
    except NotAnExpressionError:
        return Reason.NOT_AN_EXPRESSION
    except ExpressionTooLargeError:
        return Reason.TOO_LARGE
    return tree


_NOTHING: Final = Token("nothing", "")
"""What stands behind the last token."""


class _Parser:
    """Recursive descent over the tokens; every recursion goes through ``_deeper``."""

    def __init__(self, tokens: list[Token]) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._bars = 0

    def whole(self) -> Node:
        tree = self._list(())
        if self._at != len(self._tokens):
            raise NotAnExpressionError
        return tree

    # Reading tokens.

    def _peek(self, ahead: int = 0) -> Token:
        index = self._at + ahead
        return self._tokens[index] if index < len(self._tokens) else _NOTHING

    def _next(self) -> Token:
        """Take a token; there being none is the end of every loop that waits for a closing one."""
        token = self._peek()
        if token is _NOTHING:
            raise NotAnExpressionError
        self._at += 1
        return token

    def _is_op(self, *values: str) -> bool:
        token = self._peek()
        return token.kind == "op" and token.value in values

    def _take(self, *values: str) -> str | None:
        return self._next().value if self._is_op(*values) else None

    def _expect(self, value: str) -> None:
        if not self._take(value):
            raise NotAnExpressionError

    def _deeper(self) -> None:
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise ExpressionTooLargeError

    # Levels of the grammar, from the loosest to the tightest binding.

    def _list(self, closers: tuple[str, ...]) -> Node:
        """Items between commas, ``;``, ``and`` or ``or``; a single item is returned as itself."""
        items, words = [self._relations()], set[str]()
        while not self._is_op(*closers) and self._is_op(",", ";", "and", "or"):
            words.add(self._next().value)
            words.add(self._take("and", "or") or ",")
            items.append(self._relations())
            if len(items) > MAX_ITEMS:
                raise ExpressionTooLargeError
        if len(items) == 1:
            return items[0]
        return Node("list", "or" if words & {"or", "and"} else ",", tuple(items))

    def _relations(self) -> Node:
        """One relation, or a chain of them: ``0 < x <= 1`` is two relations that hold together."""
        sides, signs = [self._union()], list[str]()
        while self._peek().kind == "relation" or self._is_op(*RELATIONS):
            signs.append(RELATIONS[self._next().value])
            sides.append(self._union())
            if len(sides) > MAX_ITEMS:
                raise ExpressionTooLargeError
        if not signs:
            return sides[0]
        parts = [Node("relation", sign, (sides[index], sides[index + 1])) for index, sign in enumerate(signs)]
        return parts[0] if len(parts) == 1 else Node("chain", "", tuple(parts))

    def _union(self) -> Node:
        parts = [self._sum()]
        while self._take("∪"):
            parts.append(self._sum())
        return parts[0] if len(parts) == 1 else Node("union", "", tuple(parts))

    def _sum(self) -> Node:
        self._deeper()
        sign = self._take("+", "-", "±")
        node = self._product()
        if sign == "-":
            node = Node("neg", "", (node,))
        elif sign == "±":
            node = Node("pm", "", (Node("number", "0"), node))
        while sign := self._take("+", "-", "±"):
            right = self._product()
            kind = "pm" if sign == "±" else "add"
            node = Node(kind, "", (node, Node("neg", "", (right,)) if sign == "-" else right))
        self._depth -= 1
        return node

    def _product(self) -> Node:
        node = self._factor()
        while True:
            sign = self._take("*", "/")
            if sign:
                right = self._signed_factor()
                node = Node("div" if sign == "/" else "mul", "", (node, right))
            elif self._starts_factor():
                node = self._juxtaposed(node)
            else:
                return node

    def _signed_factor(self) -> Node:
        negative = False
        while sign := self._take("+", "-"):
            negative ^= sign == "-"
        node = self._factor()
        return Node("neg", "", (node,)) if negative else node

    def _starts_factor(self) -> bool:
        token = self._peek()
        if token.kind in {"number", "symbol", "constant", "function", "begin"}:
            return True
        if token.kind == "command":
            return token.value != "degree"
        return self._is_op("(", "{", "[") or (self._is_op("|") and not self._bars)

    def _juxtaposed(self, left: Node) -> Node:
        r"""An implicit product; after an integer a fraction makes a mixed number, and a bare number makes nothing."""
        token = self._peek()
        whole = left.kind == "number" and "." not in left.value
        if token.kind == "number":
            slash, under = self._peek(1), self._peek(2)
            if not (whole and slash.value == "/" and under.kind == "number" and "." not in token.value + under.value):
                raise NotAnExpressionError
            self._at += 3
            return Node("add", "", (left, Node("div", "", (Node("number", token.value), Node("number", under.value)))))
        right = self._factor()
        if whole and token == Token("command", "frac") and all(part.kind == "number" for part in right.parts):
            return Node("add", "", (left, right))
        return Node("mul", "", (left, right))

    def _factor(self) -> Node:
        """An atom with its exponent, factorial, percent and degree signs."""
        node = self._atom()
        while True:
            if self._take("^"):
                node = Node("pow", "", (node, self._exponent()))
            elif self._take("!"):
                if self._is_op("!"):
                    raise NotAnExpressionError
                node = Node("factorial", "", (node,))
            elif self._take("%"):
                node = Node("div", "", (node, Node("number", "100")))
            elif self._peek() == Token("command", "degree"):
                self._at += 1
                node = Node("degree", "", (node,))
            else:
                return node

    def _exponent(self) -> Node:
        self._deeper()
        negative = False
        while sign := self._take("+", "-"):
            negative ^= sign == "-"
        node = self._atom()
        if self._take("^"):
            node = Node("pow", "", (node, self._exponent()))
        self._depth -= 1
        return Node("neg", "", (node,)) if negative else node

    def _atom(self) -> Node:
        self._deeper()
        token = self._next()
        if token.kind == "number":
            node = Node("number", token.value)
        elif token.kind == "constant":
            node = Node("constant", token.value)
        elif token.kind == "symbol":
            node = self._symbol(token.value)
        elif token.kind == "function":
            node = self._function(token.value)
        elif token.kind == "command":
            node = self._command(token.value)
        elif token.kind == "begin":
            node = self._matrix(token.value)
        elif token.kind == "op":
            node = self._bracketed(token.value)
        else:
            raise NotAnExpressionError
        self._depth -= 1
        return node

    # Atoms.

    def _symbol(self, name: str) -> Node:
        if self._take("_"):
            braced = self._take("{")
            parts = [self._next()]
            while braced and not self._is_op("}"):
                parts.append(self._next())
            if braced:
                self._expect("}")
            if not all(part.kind in {"number", "symbol", "constant"} for part in parts):
                raise NotAnExpressionError
            name = f"{name}_{''.join(part.value for part in parts)}"
        if name in APPLIED and self._take("("):
            arguments = self._list((")",))
            self._expect(")")
            return Node("call", name, arguments.parts if arguments.kind == "list" else (arguments,))
        return Node("symbol", name)

    def _function(self, name: str) -> Node:
        if name == "sqrt":
            return self._root()
        base = self._subscript() if name == "log" and self._take("_") else None
        power = self._exponent() if self._take("^") else None
        argument = self._argument()
        if name not in SEVERAL_ARGUMENTS and argument.kind == "list":
            raise NotAnExpressionError
        arguments = argument.parts if argument.kind == "list" else (argument,)
        inverse = power is not None and power == Node("neg", "", (Node("number", "1"),))
        if inverse and name in {"sin", "cos", "tan"}:
            return Node("function", f"arc{name}", arguments)
        if inverse:
            raise NotAnExpressionError
        node = Node("function", name, (*arguments, base) if base else arguments)
        return Node("pow", "", (node, power)) if power else node

    def _subscript(self) -> Node:
        return self._atom()

    def _argument(self) -> Node:
        """What a function applies to: brackets, or the factors up to the next operator or function."""
        if self._is_op("("):
            self._at += 1
            inside = self._list((")",))
            self._expect(")")
            return inside
        node = self._factor()
        while self._starts_factor() and self._peek().kind != "function" and not self._is_op("(", "[", "|"):
            node = self._juxtaposed(node)
        return node

    def _root(self) -> Node:
        index = None
        if self._take("["):
            index = self._sum()
            self._expect("]")
        radicand = self._atom()
        return Node("root", "", (radicand, index)) if index else Node("root", "", (radicand,))

    def _command(self, name: str) -> Node:
        if name == "frac":
            return self._fraction()
        if name == "binom":
            return Node("binomial", "", (self._braced(), self._braced()))
        if name == "emptyset":
            return Node("set")
        if name == "boxed":
            return self._braced()
        if name == "mathbb":
            inside = self._braced()
            if inside.kind == "symbol" and inside.value in {"R", "Z", "N", "Q", "C"}:
                return Node("symbol", f"set_{inside.value}")
        raise NotAnExpressionError

    def _fraction(self) -> Node:
        token = self._peek()
        if token.kind == "number" and token.value.isdigit() and len(token.value) == 2:  # noqa: PLR2004 - \frac12
            self._at += 1
            return Node("div", "", (Node("number", token.value[0]), Node("number", token.value[1])))
        return Node("div", "", (self._tex_argument(), self._tex_argument()))

    def _tex_argument(self) -> Node:
        """What TeX takes as an argument: a braced group, or one character."""
        if self._is_op("{"):
            return self._braced()
        token = self._next()
        if token.kind == "number" and len(token.value) == 1:
            return Node("number", token.value)
        if token.kind in {"symbol", "constant"}:
            return Node(token.kind, token.value)
        raise NotAnExpressionError

    def _braced(self) -> Node:
        self._expect("{")
        inside = self._sum()
        self._expect("}")
        return inside

    def _bracketed(self, opener: str) -> Node:
        """Brackets of every kind: grouping around one item, a tuple or an interval around several, or a set."""
        if opener == "|":
            self._bars += 1
            inside = self._sum()
            self._bars -= 1
            self._expect("|")
            return Node("function", "abs", (inside,))
        if opener not in {"(", "[", "{", "\\{"}:
            raise NotAnExpressionError
        bars, self._bars = self._bars, 0
        node = self._between(opener)
        self._bars = bars
        return node

    def _between(self, opener: str) -> Node:
        closers = {"(": (")", "]"), "[": (")", "]"), "{": ("}",), "\\{": ("\\}",)}[opener]
        if opener in {"\\{", "{"} and self._take(closers[0]):
            return Node("set")
        inside = self._list(closers)
        closer = self._take(*closers)
        if closer is None:
            raise NotAnExpressionError
        several = inside.kind == "list" and inside.value == ","
        if opener == "\\{" or (opener == "{" and several):
            return Node("set", "", inside.parts if inside.kind == "list" else (inside,))
        if several:
            return Node("tuple", opener + closer, inside.parts)
        if inside.kind == "list" or opener + closer in {"(]", "[)"}:
            raise NotAnExpressionError
        return inside

    def _matrix(self, environment: str) -> Node:
        if environment not in {"matrix", "pmatrix", "bmatrix"}:
            raise NotAnExpressionError
        rows, row = list[Node](), [self._sum()]
        while True:
            if self._take("&"):
                row.append(self._sum())
            elif self._take("row"):
                rows.append(Node("tuple", "()", tuple(row)))
                if self._peek() == Token("end", environment):
                    row = []
                    break
                row = [self._sum()]
            else:
                break
            if len(row) > MAX_ITEMS or len(rows) > MAX_ITEMS:
                raise ExpressionTooLargeError
        if self._next() != Token("end", environment):
            raise NotAnExpressionError
        rows += [Node("tuple", "()", tuple(row))] if row else []
        return Node("matrix", "", tuple(rows))


def _check_sizes(node: Node) -> Fraction | None:
    """Refuse powers and factorials of constants that would grow beyond the limits; give the value where it is known.

    Sums and products need no bound of their own: there are at most ``MAX_EXPRESSION_TOKENS`` bounded operands.
    """
    values = [_check_sizes(part) for part in node.parts]
    if node.kind == "number":
        return Fraction(node.value if node.value != "." else "0")
    if node.kind == "pow" and values[1] is not None and abs(values[1]) > MAX_EXPONENT:
        raise ExpressionTooLargeError
    known = [value for value in values if value is not None]
    if len(known) < len(values) or node.kind not in _VALUES:
        return None
    return _VALUES[node.kind](*known)


def _power(base: Fraction, exponent: Fraction) -> Fraction | None:
    if abs(exponent) > MAX_EXPONENT or exponent.denominator > MAX_EXPONENT:
        raise ExpressionTooLargeError
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if bits * abs(exponent) > MAX_POWER_BITS:
        raise ExpressionTooLargeError
    if exponent.denominator != 1 or (not base and exponent < 0):
        return None
    return base**exponent.numerator


def _factorial(argument: Fraction) -> Fraction:
    if argument > MAX_FACTORIAL:
        raise ExpressionTooLargeError
    if argument < 0 or argument.denominator != 1:
        raise NotAnExpressionError
    product = 1
    for factor in range(2, int(argument) + 1):
        product *= factor
    return Fraction(product)


def _binomial(*arguments: Fraction) -> None:
    if max(arguments) > MAX_FACTORIAL:
        raise ExpressionTooLargeError


_VALUES: Final[dict[str, Callable[..., Fraction | None]]] = {
    "neg": lambda value: -value,
    "add": lambda left, right: left + right,
    "mul": lambda left, right: left * right,
    "div": lambda over, under: over / under if under else None,
    "pow": _power,
    "factorial": _factorial,
    "binomial": _binomial,
}
