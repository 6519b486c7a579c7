r"""From the text of an expression to its tokens: the tables of names and the only regular expressions of the grammar.

No name is looked up anywhere but in these tables, and a character that no rule knows refuses the whole text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from routing_lab.answers.limits import MAX_EXPRESSION_DIGITS, MAX_EXPRESSION_TOKENS
from routing_lab.answers.spelling import harmless_words

__all__ = [
    "APPLIED",
    "FUNCTIONS",
    "RELATIONS",
    "SEVERAL_ARGUMENTS",
    "ExpressionTooLargeError",
    "NotAnExpressionError",
    "Token",
    "math_part",
    "tokenize",
]


class NotAnExpressionError(Exception):
    """The text is outside the grammar."""


class ExpressionTooLargeError(Exception):
    """The text is beyond a limit."""


_FUNCTIONS_WORDS: Final = """
    sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh exp ln log lg abs sqrt min max gcd lcm
"""
FUNCTIONS: Final = frozenset(_FUNCTIONS_WORDS.split())
SEVERAL_ARGUMENTS: Final = frozenset({"min", "max", "gcd", "lcm"})
_GREEK_WORDS: Final = """
    alpha beta gamma delta epsilon varepsilon zeta eta theta vartheta iota kappa lambda mu nu xi rho sigma tau
    upsilon phi varphi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega
"""
_GREEK: Final = frozenset(_GREEK_WORDS.split())
_CONSTANTS: Final = {"e": "e", "i": "i", "pi": "pi", "infty": "oo", "infinity": "oo", "inf": "oo"}
APPLIED: Final = frozenset("fgh")
RELATIONS: Final = {
    "=": "=", "<": "<", ">": ">", "<=": "<=", ">=": ">=", "!=": "!=", "le": "<=", "leq": "<=", "leqslant": "<=",
    "ge": ">=", "geq": ">=", "geqslant": ">=", "lt": "<", "gt": ">", "ne": "!=", "neq": "!=", "in": "in",
}  # fmt: skip
_OPERATOR_COMMANDS: Final = {
    "times": "*", "cdot": "*", "div": "/", "pm": "±", "cup": "∪", "lor": "or", "land": "and", "lbrace": "\\{",
    "rbrace": "\\}", "vert": "|", "lvert": "|", "rvert": "|", "mid": "|", "colon": ":", "ast": "*",
}  # fmt: skip
_IGNORED_COMMANDS_WORDS: Final = """
    left right big Big bigl bigr Bigl Bigr displaystyle textstyle limits quad qquad hspace
"""
_IGNORED_COMMANDS: Final = frozenset(_IGNORED_COMMANDS_WORDS.split())
_UNICODE: Final = str.maketrans(
    {
        **dict.fromkeys("−–‐‑﹣－", "-"), **dict.fromkeys("×·⋅∙", "*"), **dict.fromkeys("÷⁄∕", "/"),
        **dict.fromkeys("\u00a0\u2009\u202f\u3000", " "), **dict.fromkeys("，、", ", "),
        "≤": "<=", "≥": ">=", "≠": "!=", "⩽": "<=", "⩾": ">=", "±": "\\pm ", "∪": "\\cup ", "∈": "\\in ",
        "∞": "\\infty ", "√": "\\sqrt ", "∅": "\\emptyset ", "°": "^\\circ ", "π": "\\pi ", "θ": "\\theta ",
        "α": "\\alpha ", "β": "\\beta ", "λ": "\\lambda ", "½": " 1/2", "¼": " 1/4", "¾": " 3/4", "⅓": " 1/3",
        "⅔": " 2/3", "（": "(", "）": ")", "＝": "=", "＋": "+", "；": ";", "或": " or ", "和": " and ", "。": "",
    },
)  # fmt: skip
_SUPERSCRIPTS: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿˣ", "0123456789-+nx")
_RAISED: Final = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿˣ]++")
_DEGREE: Final = re.compile(r"\^\s?(?:\{\s?)?\\circ(?![a-z])\s?\}?|\\degree(?![a-z])")
_GROUPING: Final = re.compile(r"\{,\}|,\\!\s?")

_TOKEN: Final = re.compile(
    r"""(?P<space> \s++ | \\[,;:!>\ ] | ~ | \\(?=\Z) )
      | (?P<row> \\\\ )
      | (?P<text> \\ (?: (?P<words> text(?:rm|bf|it)? | mbox ) | math(?:rm|bf|it) | operatorname )
          \s*+ \{ (?P<inside> [^{}]*+ ) \} )
      | (?P<begin> \\ (?P<edge> begin | end ) \s*+ \{ (?P<environment> [a-zA-Z*]{1,12} ) \} )
      | \\ (?P<command> [A-Za-z]++ )
      | (?P<escaped> \\[{}|%$] )
      | (?P<number> [0-9]++ (?: \. (?! \. ) [0-9]*+ )? | \. [0-9]++ )
      | (?P<word> [A-Za-z]++ )
      | (?P<operator> \*\* | <= | >= | != | [-+*/^!=<>|()\[\]{},;%&_:$] )
    """,
    re.VERBOSE,
)


@dataclass(frozen=True, slots=True)
class Token:
    """A token: its kind (``number``, ``symbol``, ``op``, …) and its text."""

    kind: str
    value: str


def math_part(text: str) -> str:
    """Take ``$…$`` out of a sentence whose other words leave it as it is."""
    before, mark, rest = text.partition("$")
    inside, _, after = rest.partition("$")
    if mark and inside.strip() and "$" not in after and (before.strip() or after.strip()):
        around = f"{before} {after}"
        if not any(character.isdigit() for character in around) and harmless_words(around):
            return inside
    return text


def tokenize(text: str) -> list[Token]:
    """Cut the text into tokens; a character that no rule knows refuses the whole."""
    text = _RAISED.sub(lambda raised: f"^{{{raised.group().translate(_SUPERSCRIPTS)}}}", text).translate(_UNICODE)
    text = _GROUPING.sub("\\,", _DEGREE.sub("\\\\degree ", text)) if "{,}" in text or "\\" in text else text
    text = _joined_groups(text)
    tokens: list[Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None:
            raise NotAnExpressionError
        at = match.end()
        tokens.extend(_from_match(match))
        if len(tokens) > MAX_EXPRESSION_TOKENS:
            raise ExpressionTooLargeError
    return _without_units(tokens)


_GROUPS: Final = re.compile(r"(?<![0-9.,])[0-9]{1,3}(?:(?:,|\\,)[0-9]{3})+(?![0-9]|,[0-9]|\\,[0-9])")


def _joined_groups(text: str) -> str:
    """Join digits in groups of three, outside brackets only: inside them a comma separates items."""
    pieces, depth, at = [], 0, 0
    for match in _GROUPS.finditer(text):
        depth += sum(1 if mark in "([{" else -1 for mark in text[at : match.start()] if mark in "([{)]}")
        pieces.append(text[at : match.start()])
        group = match.group()
        pieces.append(re.sub(r"\D", "", group) if depth == 0 or "\\" in group else group)
        at = match.end()
    return "".join([*pieces, text[at:]])


def _from_match(match: re.Match[str]) -> list[Token]:
    value = match.group(match.lastgroup or "")
    match match.lastgroup:
        case "text":
            return _from_text(match["inside"].strip(), words=bool(match["words"]))
        case "begin":
            return [Token(match["edge"], match["environment"])]
        case "command":
            return _from_command(value)
        case "word":
            return _from_word(value)
        case "number" if len(value) > MAX_EXPRESSION_DIGITS:
            raise ExpressionTooLargeError
        case "escaped" | "operator" | "row":
            return _from_operator(value)
    return [Token("number", value)] if match.lastgroup == "number" else []


def _from_operator(value: str) -> list[Token]:
    if value in {"$", "\\$"}:
        return []
    return [Token("op", {"**": "^", "\\|": "|", "\\%": "%", "\\\\": "row"}.get(value, value))]


def _from_text(inside: str, *, words: bool) -> list[Token]:
    r"""Read ``\text{or}`` as a connector, ``\mathrm{e}`` as a name, and all else (``\text{ m}``) as a unit."""
    connector = inside.casefold().strip(" ,")
    if connector in {"or", "and"}:
        return [Token("op", connector)]
    if inside in FUNCTIONS or (len(inside) == 1 and inside.isalpha() and not words):
        return _from_word(inside)
    return [Token("unit", inside)]


def _from_command(name: str) -> list[Token]:
    if name in _IGNORED_COMMANDS:
        return []
    if name in RELATIONS:
        return [Token("relation", RELATIONS[name])]
    if name in _OPERATOR_COMMANDS:
        return [Token("op", _OPERATOR_COMMANDS[name])]
    if name in FUNCTIONS or name in _GREEK or name in _CONSTANTS:
        return _from_word(name)
    if name in {"frac", "dfrac", "tfrac", "cfrac"}:
        return [Token("command", "frac")]
    if name in {"binom", "dbinom", "tbinom", "emptyset", "varnothing", "boxed", "mathbb", "degree"}:
        return [Token("command", {"varnothing": "emptyset", "dbinom": "binom", "tbinom": "binom"}.get(name, name))]
    raise NotAnExpressionError


def _from_word(word: str) -> list[Token]:
    """Split letters into names: a known name, a known function run into its one-letter argument, or single letters."""
    if word.casefold() in {"or", "and"}:
        return [Token("op", word.casefold())]
    if word in FUNCTIONS:
        return [Token("function", "log10" if word == "lg" else word)]
    if word in _GREEK:
        return [Token("symbol", word)]
    if word in _CONSTANTS:
        return [Token("constant", _CONSTANTS[word])]
    if len(word) > 1 and word[:-1] in FUNCTIONS:
        return [Token("function", word[:-1]), *_from_word(word[-1])]
    if len(word) > 3:  # noqa: PLR2004 - xyz is a product, "then" is a word
        raise NotAnExpressionError
    return [
        Token("constant", _CONSTANTS[letter]) if letter in _CONSTANTS else Token("symbol", letter) for letter in word
    ]


_UNIT_TAIL: Final = re.compile(r"unit(?:\^(?:-?[1-4]|\{-?[1-4]\}))?(?:/?unit(?:\^(?:-?[1-4]|\{-?[1-4]\}))?){0,4}")
"""Units with small exponents, each unit written as the word ``unit``."""


def _without_units(tokens: list[Token]) -> list[Token]:
    r"""Drop a unit at the end, ``\text{cm}^2``; words elsewhere, or words that change the value, refuse the whole."""
    first = next((index for index, token in enumerate(tokens) if token.kind == "unit"), None)
    if first is None:
        return tokens
    tail = tokens[first:]
    units = [token.value for token in tail if token.kind == "unit"]
    shape = "".join("unit" if token.kind == "unit" else token.value for token in tail)
    if first == 0 or not _UNIT_TAIL.fullmatch(shape) or not harmless_words(" and ".join(["it", *units]), units=True):
        raise NotAnExpressionError
    return tokens[:first]
