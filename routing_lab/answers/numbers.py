r"""Numbers as people and models write them, read exactly: ``1,234``, ``−7``, ``$18.00``, ``3/4``, ``2 1/2``, ``1e3``.

Only ``int`` and ``Fraction`` are used, and every size is bounded before anything is computed.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Final

from routing_lab.answers.limits import MAX_DIGITS, MAX_EXPONENT

__all__ = ["NumberTooLargeError", "read_number"]

_SIGNS: Final = str.maketrans({"−": "-", "–": "-", "‐": "-", "\u2011": "-", "＋": "+", "\u00a0": " ", "\u202f": " "})
_CURRENCY: Final = re.compile(r"^([-+]?)\s{0,3}(?:\\?\$|€|£|¥|₹|US\$|USD\s|EUR\s)\s{0,3}")
# A unit or a percent sign after the number: words, never another number.
_UNIT: Final = re.compile(r"(?:\s{0,3}\\?%|\s{0,3}°[CFK]?|(?:\s|\\[ ,;])+(?:\\text\{)?\s{0,3}[A-Za-z²³/$€£ ]{1,40}\}?)$")
_FRACTION: Final = re.compile(r"\\[dt]?frac\s{0,3}\{\s{0,3}([-+]?\d+)\s{0,3}\}\s{0,3}\{\s{0,3}(\d+)\s{0,3}\}")
_POWER: Final = re.compile(r"([-+]?)(?:(\d+(?:\.\d+)?)\s{0,3}(?:\\times|\\cdot|[x×*·])\s{0,3})?10\s{0,3}\^\s{0,3}\{?([-+]?\d{1,6})\}?")
_DECIMAL: Final = re.compile(r"([-+]?)(\d+|\d{1,3}(?:[, ]\d{3})+|)(?:\.(\d+))?(?:[eE]([-+]?\d{1,6}))?")
_QUOTIENT: Final = re.compile(r"([-+]?)(?:(\d+)(?:\s+|\s{0,3}\+\s{0,3}))?(\d+)\s{0,3}/\s{0,3}(\d+)")


class NumberTooLargeError(ValueError):
    """The text is a number, and beyond the bounds of ``limits``."""


def read_number(text: str) -> Fraction | None:
    """The one number that ``text`` is, percent sign and unit left out, or ``None`` where it is not one.

    Raises:
        NumberTooLargeError: It has more than ``MAX_DIGITS`` digits or an exponent beyond ``MAX_EXPONENT``.
    """
    if len(text) > MAX_DIGITS + 100:
        if sum(character.isdigit() for character in text) > MAX_DIGITS:
            raise NumberTooLargeError(f"more than {MAX_DIGITS} digits")
        return None
    bare = _CURRENCY.sub(r"\1", text.translate(_SIGNS).replace("{,}", ",").replace(r"\!", "").strip())
    bare = _FRACTION.sub(r" \1/\2", bare).strip().replace("- ", "-")
    # The whole first: a unit is taken off only where the text is not a number with it.
    for candidate in (bare, _UNIT.sub("", bare)):
        value = _power(candidate) or _quotient(candidate) or _decimal(candidate)
        if value is not None:
            return value
    return None


def _power(text: str) -> Fraction | None:
    match = _POWER.fullmatch(text)
    if match is None:
        return None
    sign, factor, exponent = match.groups()
    return _signed(sign, Fraction(factor or 1) * _ten_to(exponent))


def _quotient(text: str) -> Fraction | None:
    match = _QUOTIENT.fullmatch(text)
    if match is None or not int(match[4]):
        return None
    sign, whole, over, under = match.groups()
    return _signed(sign, int(whole or 0) + Fraction(int(over), int(under)))


def _decimal(text: str) -> Fraction | None:
    match = _DECIMAL.fullmatch(text)
    if match is None or not (match[2] or match[3]):
        return None
    sign, whole, places, exponent = match.groups()
    digits = re.sub("[, ]", "", whole) or "0"
    value = Fraction(int(digits + (places or "")), 10 ** len(places or ""))
    return _signed(sign, value * _ten_to(exponent or "0"))


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign == "-" else value


def _ten_to(exponent: str) -> Fraction:
    if abs(int(exponent)) > MAX_EXPONENT:
        raise NumberTooLargeError(f"an exponent beyond {MAX_EXPONENT}")
    return Fraction(10) ** int(exponent)
