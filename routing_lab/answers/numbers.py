r"""Exact numbers from the spellings that people and models use: ``1,234``, ``−7``, ``$18.00``, ``2 1/2``, ``10^3``.

Only ``int`` and ``Fraction`` are used and every size is bounded before it is computed. Rules, each written once:

1.  *One number.* An answer is cut where ``or``, ``and``, a semicolon or a comma with a blank separates; all parts that
    hold digits must be the same number, or the answer is ambiguous. ``1,234`` is a number, ``1, 234`` and ``12,13`` are
    two. Outside the number (rule 4) another digit makes it ambiguous as well.
2.  *Spellings*: a sign (any Unicode minus, also "minus" by name), digits in groups of three, a decimal point, ``e`` or
    ``× 10^``, powers of ten, ``p/q``, ``\frac{p}{q}``, ``½``, mixed numbers, repeating decimals with a bar or brackets.
    Superscripts are exponents: ``10³`` is 1000, never 103 (which Unicode's NFKC would make of it).
3.  *In front* may stand a currency sign, ``x =`` (of a chain of equations the last side counts) and words like
    "exactly"; "about" and "≈" do not declare an exact number.
4.  *Behind* may stand a percent sign, a unit, and words ("12 apples", "42. I hope it is correct") unless they change
    the number ("half", "squared", "not"; a "million" is multiplied) or calculate with it (``5x``, ``5!``,
    ``4\sqrt{2}``).
5.  *A rounded decimal is no fraction*: ``0.333`` is 333/1000, and ``0.333...`` is no number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

from routing_lab.answers.judgement import Reason
from routing_lab.answers.limits import MAX_DIGITS, MAX_EXPONENT
from routing_lab.answers.spelling import ascii_spelling, harmless_words

__all__ = ["Number", "read_number"]


@dataclass(frozen=True, slots=True)
class Number:
    """A number and how it was written: ``quotient`` (``84/2``, ``1 1/2``), ``percent`` (the value is not divided)."""

    value: Fraction
    quotient: bool = False
    percent: bool = False


class _TooLargeError(Exception):
    """The text is a number beyond the limits."""


_GROUPED: Final = (
    r"[0-9]{1,3}(?:,[0-9]{3}){1,1400}(?![0-9]|,[0-9])"
    r"|[0-9]{1,3}(?:[ '_][0-9]{3}){1,1400}(?![0-9]|[ '_][0-9]|\s*+/)|[0-9]++"
)
_NUMBER: Final = re.compile(
    rf"""
    (?P<sign> [-+]? ) \ ?+
    (?: (?: (?P<whole> [0-9]++ ) (?: \ ++ (?: and\ ++ )? | (?= \\frac ) ) )?
        (?: (?P<over> {_GROUPED} ) \ ?+ / \ ?+ (?P<under> {_GROUPED} ) (?! [0-9]*+ \ ?+ / | \.[0-9] )
          | \\frac \ ?+ (?: \{{ \ *+ (?P<top_sign> [-+]? ) \ *+ (?P<top> {_GROUPED} ) \ *+ \}} | (?P<top1> [0-9] ) )
                \ ?+ (?: \{{ \ *+ (?P<bottom> {_GROUPED} ) \ *+ \}} | (?P<bottom1> [0-9] ) ) )
      | (?P<integer> {_GROUPED} )?
        (?: \. (?! \. ) (?P<places> [0-9]*+ )
            (?: \\overline\ ?+ \{{ (?P<bar> [0-9]++ ) \}} | \( (?P<cycle> [0-9]++ ) \) )? )?
        (?: [eE] (?P<exponent> [-+]? [0-9]++ )
          | \ *+ (?: \* | x (?= \ *+ 10 ) ) \ *+ 10 \ *+ (?: \^ | \*\* ) \ *+ (?P<brace> \{{ )? \ *+
            (?P<power> [-+]? [0-9]++ ) \ *+ (?(brace) \}} ) )?
    )
    """,
    re.VERBOSE,
)
_POWER_OF_TEN: Final = re.compile(
    r"(?P<sign>[-+]?) ?+10 *+(?:\^|\*\*) *+(?:\{ *+(?P<braced>[-+]?[0-9]++) *+\}|(?P<bare>[-+]?[0-9]++))"
)

_CURRENCY: Final = r"(?:US\$|[$€£¥₹元]|USD\b|EUR\b|GBP\b|Rs\.?)"
_FRONT: Final = re.compile(
    rf"""(?: (?: is | are | equals? (?:\ to)? | exactly | simply | just | only | therefore | thus | so | hence
               | there\ are | a\ total\ of | [是为共] | 等于 | = ) (?![A-Za-z]) [:\s]*+ )*
         (?P<sign> (?: [-+] | (?: minus | negative ) \  ) \ *+ )? (?: {_CURRENCY} \ *+ )?""",
    re.VERBOSE | re.IGNORECASE,
)
_SEPARATOR: Final = re.compile(r"(?:(?<=[\s\d)])(?:or|and)(?=[\s\d(])|;|, |(?<=\d)\s*或|(?<=\d)\s*和)", re.IGNORECASE)
_PERCENT: Final = re.compile(r"%|per ?cent|pct\b", re.IGNORECASE)
_DIGIT: Final = re.compile(r"[0-9]")
# "42 or so", "42, give or take", "42 cannot be right", "42 is impossible": these words say nothing wrong one by one.
_TAKEN_BACK: Final = re.compile(
    r"\b(?:or so|or thereabouts|give or take|(?:cannot|can never|could never) be (?:right|correct|true|the answer)"
    r"|(?:is|was|seems|looks) (?:clearly |obviously |plainly )?(?:impossible|invalid|untrue|absurd|off))\b",
    re.IGNORECASE,
)

_UNIT_SYMBOL: Final = (
    r"(?:[kcmnµμ]?m|[kmµμ]?g|t|[mnµμ]?s|sec|min|h|hr|hrs|[mcd]?[Ll]|k?[JNWV]|kWh|m?A|[kMG]?Hz|mol|C|F|k?Pa|ha|ft|in|yd|mi"
    r"|lbs?|oz|pt|mph|kph|kmh|rpm|bps|[kKMGT]?B|bits?|°[CF]?|deg|rad|[ap]m|[AP]M|[ap]\.m\.?|cents?|¢|percent|units?|sq|cubic"
    r"|(?:day|week|month|year|hour|minute|second|dollar|euro|meter|metre|degree)s?)"
)
_UNIT_FACTOR: Final = rf"{_UNIT_SYMBOL}(?:\s?\^\s?\{{?[-+]?[1-4]\}}?)?"
_UNIT: Final = re.compile(rf"\s{{0,3}}(?:{_UNIT_FACTOR}(?:\s?[/* ]\s?{_UNIT_FACTOR}){{0,3}}|{_UNIT_SYMBOL}\.)")
_SCALES: Final = {
    "hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "百": 2, "千": 3, "万": 4, "亿": 8,
}  # fmt: skip
_SCALE: Final = re.compile(r"\s?(hundred|thousand|million|billion|trillion|百|千|万|亿)s?(?![A-Za-z])", re.IGNORECASE)
# 5x, 5 a, 5!, 5 * 3, 4\sqrt{2}, 10^10^10, 17 (mod 20): the number is only the beginning of a formula.
_PRODUCT: Final = re.compile(r"[A-Za-z0-9_]|\s*+(?:[-+*/^!?\\:|√±]|[a-z]\s*+$|\(?mod\b)", re.IGNORECASE)


def read_number(text: str) -> Number | Reason:
    """Read the one number that ``text`` declares.

    Args:
        text: An extracted answer of at most ``limits.MAX_ANSWER_CHARS`` characters.

    Returns:
        The number; ``Reason.AMBIGUOUS`` for several; ``Reason.TOO_LARGE`` beyond ``limits.MAX_DIGITS`` digits or
        ``limits.MAX_EXPONENT``; ``Reason.NOT_A_NUMBER`` for everything else. Never raises.
    """
    if text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS:
        return Number(Fraction(int(text)))
    try:
        return _one_number(ascii_spelling(text))
    except _TooLargeError:
        return Reason.TOO_LARGE


def _one_number(text: str) -> Number | Reason:
    """Rule 1: all the parts of the answer that hold digits are one and the same number."""
    if _TAKEN_BACK.search(text):
        return Reason.NOT_A_NUMBER
    parts = [part for part in _SEPARATOR.split(_without_brackets(text)) if part.strip()]
    if len(parts) > 1 and (mixed := _mixed_by_words(text)):
        return mixed
    found: Number | None = None
    for part in parts:
        if not _DIGIT.search(part):
            if not harmless_words(part):
                return Reason.NOT_A_NUMBER
            continue
        number = _in_part(part)
        if isinstance(number, Reason):
            return Reason.AMBIGUOUS if len(parts) > 1 and number is Reason.NOT_A_NUMBER else number
        if found is not None and found.value != number.value:
            return Reason.AMBIGUOUS
        found = found or number
    return found or Reason.NOT_A_NUMBER


def _without_brackets(text: str) -> str:
    """Take off one pair of brackets around everything: ``(5)``, ``{5}``."""
    while len(text) > 1 and (text[0], text[-1]) in {("(", ")"), ("{", "}")}:
        inner = text[1:-1].strip()
        if any(mark in inner for mark in "(){}"):
            break
        text = inner
    return text


def _mixed_by_words(text: str) -> Number | None:
    """``2 and 1/2`` is one number, although ``and`` separates."""
    match = _NUMBER.fullmatch(text)
    return _value(match) if match and match["whole"] and not match["whole"].isspace() else None


def _in_part(text: str) -> Number | Reason:
    """Rules 2 to 4 on a part that holds digits; of a chain of equations the last side."""
    *others, side = text.split("=")
    if any(other.endswith(("!", "<", ">")) for other in others):
        return Reason.NOT_A_NUMBER
    number = _on_side(side.strip())
    if isinstance(number, Number) and any(_another_number(other.strip(), number) for other in others):
        return Reason.AMBIGUOUS
    return number


def _another_number(side: str, number: Number) -> bool:
    """Whether a side is a bare number other than ``number``: ``12 = 13`` declares two."""
    match = _NUMBER.fullmatch(side)
    value = _value(match) if match else None
    return value is not None and value.value != number.value


def _on_side(text: str) -> Number | Reason:
    sign, side = _without_front(text)
    match = _POWER_OF_TEN.match(side) or _NUMBER.match(side)
    if match is None or (sign and match["sign"]):
        return Reason.NOT_A_NUMBER
    number = _value(match)
    if number is None:
        return Reason.NOT_A_NUMBER
    if sign and not sign.startswith("+"):
        number = Number(-number.value, number.quotient)
    return _with_tail(number, side[match.end() :])


def _without_front(text: str) -> tuple[str, str]:
    """Rule 3: split off what may stand in front; a sign before a currency or by name is handed back on its own."""
    front = _FRONT.match(text)
    if front is None:
        return "", text
    return front["sign"] or "", _without_brackets(text[front.end() :].strip())


def _value(match: re.Match[str]) -> Number | None:
    """Compute what the pattern has read, sizes first; ``None`` for a zero denominator."""
    parts = match.groupdict()
    sign = -1 if parts["sign"] == "-" else 1
    if match.re is _POWER_OF_TEN:
        return Number(sign * _ten_to(parts["braced"] or parts["bare"]))
    over = parts["over"] or parts["top"] or parts["top1"]
    if over:
        under = _integer(parts["under"] or parts["bottom"] or parts["bottom1"])
        if not under:
            return None
        if parts["top_sign"] == "-":
            sign = -sign
        return Number(sign * (_integer(parts["whole"] or "0") + Fraction(_integer(over), under)), quotient=True)
    cycle = parts["bar"] or parts["cycle"] or ""
    places = parts["places"] or ""
    if parts["integer"] is None and not places + cycle:
        return None
    value = Fraction(_integer((parts["integer"] or "0") + places), 10 ** len(places))
    if cycle:
        value += Fraction(_integer(cycle), (10 ** len(cycle) - 1) * 10 ** len(places))
    return Number(sign * value * _ten_to(parts["exponent"] or parts["power"] or "0"))


def _integer(digits: str) -> int:
    digits = re.sub(r"[^0-9]", "", digits)
    if len(digits) > MAX_DIGITS:
        raise _TooLargeError
    return int(digits)


def _ten_to(exponent: str) -> Fraction:
    if len(exponent) > len(str(MAX_EXPONENT)) + 1 or abs(int(exponent)) > MAX_EXPONENT:
        raise _TooLargeError
    return Fraction(10) ** int(exponent)


def _with_tail(number: Number, tail: str) -> Number | Reason:
    """Rule 4: what may follow a number, and what makes it another one."""
    scale = _SCALE.match(tail)
    if scale:
        number = Number(number.value * 10 ** _SCALES[scale[1].lower()], number.quotient)
        tail = tail[scale.end() :]
    stripped = tail.strip()
    if percent := _PERCENT.match(stripped):
        number = Number(number.value, number.quotient, percent=True)
        tail = stripped[percent.end() :]
        stripped = tail.strip()
    if not stripped or stripped in {".", ",", ";", ":", ")"} or _UNIT.fullmatch(tail.rstrip()):
        return number
    return _with_words(number, tail)


def _with_words(number: Number, tail: str) -> Number | Reason:
    unit = _UNIT.match(tail)
    if unit and not tail[unit.end() : unit.end() + 1].isalnum():
        tail = tail[unit.end() :]
    elif _PRODUCT.match(tail):
        return Reason.NOT_A_NUMBER
    if _DIGIT.search(tail):
        return _same_again(number, tail)
    return number if harmless_words(tail) else Reason.NOT_A_NUMBER


def _same_again(number: Number, tail: str) -> Number | Reason:
    """Further digits: the same number in other words (``5 (= 5.0)``) is allowed, everything else is a second answer."""
    again = re.fullmatch(r"\s*\(?\s*(?:=|i\.e\.|that is|equals)?\s*([-+]?[0-9.,]++)\s*\)?\s*", tail)
    if again and again.group(0).strip().startswith(("(", "=", "i", "t", "e")):
        second = _NUMBER.fullmatch(again[1])
        value = _value(second) if second else None
        if value and value.value == number.value:
            return number
    return Reason.AMBIGUOUS
