r"""How numbers and the words around them are spelled: one ASCII form for LaTeX and Unicode, and value-changing words.

Not Unicode's NFKC, which would make ``10³`` the number 103 and ``1½`` the fraction 11/2.
"""

from __future__ import annotations

import re
from typing import Final

__all__ = ["ascii_spelling", "harmless_words"]

_SUPERSCRIPTS: Final = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_VULGAR: Final = {
    "½": "1/2", "⅓": "1/3", "⅔": "2/3", "¼": "1/4", "¾": "3/4", "⅕": "1/5", "⅖": "2/5", "⅗": "3/5", "⅘": "4/5",
    "⅙": "1/6", "⅚": "5/6", "⅐": "1/7", "⅛": "1/8", "⅜": "3/8", "⅝": "5/8", "⅞": "7/8", "⅑": "1/9", "⅒": "1/10",
}  # fmt: skip
_SPELLINGS: Final = str.maketrans(
    {
        **dict.fromkeys("−–‐‑‒﹣－", "-"),
        **dict.fromkeys("\u00a0\u2009\u202f\u2002\u2003\u2007\u3000\t", " "),
        **dict.fromkeys("\u200b\ufeff\u2060\u00ad\u200e\u200f", None),
        **{chr(0xFF10 + digit): str(digit) for digit in range(10)},
        **{mark: f" {quotient}" for mark, quotient in _VULGAR.items()},
        **dict.fromkeys("⁄∕", "/"),
        **dict.fromkeys("×·⋅∙✕", "*"),
        "，": ", ",
        "；": ";",
        "、": "; ",
        "。": ". ",
        "％": "%",
        "﹪": "%",
        "＋": "+",
        "＝": "=",
        "．": ".",
        "：": ":",
        "（": "(",
        "）": ")",
        "≈": " about ",
        "’": "'",
        "º": "°",
        "˚": "°",
    },
)

_LATEX: Final = re.compile(
    r"""\\(?: (?P<space> [,;:!\ ] | quad | qquad ) | (?P<literal> [$%#&] )
          | (?: (?P<times> times | cdot ) | (?P<degree> circ | degree ) | (?P<frac> [dtc]?frac )
              | (?P<drop> left | right | displaystyle | limits ) | (?P<about> approx | sim ) ) (?![a-z])
          | (?: text(?:bf|it|rm)? | mathrm | mathbf | mbox | operatorname ) \s*+ \{ (?P<inside> [^{}]*+ ) \} )
      | \^ \s*+ \{ \s*+ \\circ \s*+ \} | \^ \s*+ \\circ (?![a-z])
    """,
    re.VERBOSE,
)
_RAISED: Final = re.compile(r"[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]++")

_WORD: Final = re.compile(r"[^\W\d_]++")
_CALCULATION: Final = re.compile(r"[+*^=<>|\\√π÷!?~{}\[\]°%‰‱±∞]|(?<![A-Za-z])/|/(?![A-Za-z])|\.\.|…")
_CHANGERS_WORDS: Final = """
    half halves quarter quarters third thirds fourth fourths fifth fifths sixth sixths eighth eighths ninth
    ninths tenth tenths hundredth hundredths thousandth thousandths hundred thousand million billion trillion
    dozen dozens gross doubled tripled quadrupled halved twice thrice binary octal hex hexadecimal base
    score k bn mn squared cubed factorial root sqrt cbrt log ln sin cos tan exp pi times plus minus
    over divided power mod modulo choose not isn wrong incorrect false no or nor either neither maybe perhaps
    possibly between about approximately roughly approx around least most more less than under almost nearly to
    until through below negative lakh lakhs crore crores mille promille permille basis point mio mrd milliard milliards
    myriad two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty infinity
    分之 百 千 万 亿 半 多 几 左右 或 不
"""
_CHANGERS: Final = frozenset(_CHANGERS_WORDS.split())
_LONE_LETTERS: Final = frozenset({"a", "i"})


def ascii_spelling(text: str) -> str:
    """Bring LaTeX and Unicode spellings to one ASCII form; superscripts become ``^{…}``."""
    if not text.isascii():
        text = _RAISED.sub(lambda raised: f"^{{{raised.group().translate(_SUPERSCRIPTS)}}}", text)
        text = text.translate(_SPELLINGS)
    if "\\" in text or "{" in text:
        text = _LATEX.sub(_latex_spelling, text.replace("{,}", ","))
    return text.replace("$", "").strip() if text.count("$") > 1 else text.strip()


_LATEX_SPELLINGS: Final = {"times": "*", "frac": "\\frac", "about": " about ", "drop": "", "degree": " degrees"}


def _latex_spelling(match: re.Match[str]) -> str:
    if match["space"]:
        return "" if match["space"] == "!" else " "
    if match["inside"] is not None:
        return f" {match['inside']}"
    if match["literal"]:
        return match["literal"]
    # The two forms without a name, ^\circ and ^{\circ}, are degrees too.
    return _LATEX_SPELLINGS[match.lastgroup or "degree"]


def harmless_words(text: str, *, units: bool = False) -> bool:
    """Whether words around a number leave it as it is: no changer, no calculation, no lone letter but ``a`` and ``I``.

    ``units``: letters alone are units (``m``, ``s``), since they stand where the notation itself says so.
    """
    if units:
        text = re.sub(r"\b[A-Za-z]\b|(?<=[A-Za-z])\^?[1-4]|/", " ", text)
    if _CALCULATION.search(text):
        return False
    words = [word.casefold() for word in _WORD.findall(text)]
    if any(word in _CHANGERS or (len(word) == 1 and word.isascii() and word not in _LONE_LETTERS) for word in words):
        return False
    return not any(mark in text for mark in ("分之", "百", "千", "万", "亿", "半", "多", "左右", "或", "不"))
