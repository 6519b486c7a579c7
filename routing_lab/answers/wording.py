"""Choices and texts: the two types that compare characters.

*Choice*: one option, a letter or a digit, in or out of brackets, in either case, optionally followed by the option's
own words (``(B) Paris``, ``B. Paris``, ``B because …``). ``A or B`` and ``(A), (B)`` choose nothing. A bare letter
before other words is no choice, since "A" is also an article.

*Text*: the same characters after folding case, runs of blanks, full-width ASCII and the punctuation around the whole.
Unicode is brought to NFC, not NFKC, which would make ``x²`` equal to ``x2`` and ``½`` to ``1⁄2``. Leading zeros and
inner punctuation count: ``0123`` is not ``123``.
"""

from __future__ import annotations

import re
import unicodedata
from typing import Final

from routing_lab.answers.judgement import Reason

__all__ = ["fold_text", "read_choice"]

_CHOICE: Final = re.compile(
    r"""(?: (?:the\ )? (?: option | choice | answer ) [ :]{1,3} | 选项? )?
        (?: \\(?: text(?:bf|it|rm)? | mathrm | mathbf | mbox ) \s? \{ \s? )?
        (?: [(\[（] \s? (?P<bracketed> [A-Za-z0-9] ) \s? [)\]）]
          | (?P<marked> [A-Za-z0-9] ) \s? (?: [).:、] (?! [0-9] ) | \} )
          | (?P<bare> [A-Za-z0-9] ) (?= \s*+ $ | [,;] | \s++ (?: because | since | as | is ) \b ) )
        \}?""",
    re.VERBOSE | re.IGNORECASE,
)
_SECOND_CHOICE: Final = re.compile(
    r"[\s*}.)]{0,4}(?:,|;|/|&|\b(?:or|and|as well as|plus)\b|或|和|、)\s*+(?:or|and)?\s*+"
    r"(?:(?:maybe|perhaps|possibly|probably|even|also|option|choice)\s++){0,3}[(\[]?(?P<other>[A-Za-z0-9])(?![A-Za-z0-9'])",
    re.IGNORECASE,
)
# "B, no C", "B; actually (C)": an article or an "I" that goes on as a sentence is no choice.
_CORRECTED: Final = re.compile(
    r"[\s*}.)]{0,4}[,;.?!:]?\s*+(?:(?i:no|wait|actually|rather|sorry|instead|hmm|i mean)[\s,:;.!]{1,3}){1,4}"
    r"(?:(?i:option|choice|it is|it's)\s++){0,2}[(\[]?(?P<other>[B-HJ-Z0-9]|[AI](?=[\s.)\]!]*$))(?![A-Za-z0-9'])"
)
_DENIED: Final = re.compile(
    r"[\s*)]*(?:(?:is|was)\s++(?:[a-z]{2,20}ly\s++){0,2}(?:out|excluded|impossible|ruled out|not|wrong|incorrect|false)"
    r"|(?:is|was)?\s*(?:not|n't|isn't|wrong|incorrect|false|不)"
    r"|(?:can|must) be (?:excluded|ruled out|eliminated)|cannot be (?:right|correct|true|the answer))(?![A-Za-z])",
    re.IGNORECASE,
)
_ANOTHER_BRACKETED: Final = re.compile(r"[(\[]\s?([A-Z0-9])\s?[)\]]")
_TWO_OPENLY: Final = re.compile(
    r"[(\[]?\b[A-Za-z0-9]\b[)\]]?\s*+(?:,|/|&|or|and)\s*+[(\[]?\b[A-Za-z0-9]\b", re.IGNORECASE
)

_INVISIBLE: Final = dict.fromkeys(map(ord, "\u200b\ufeff\u2060\u00ad"))
_FULL_WIDTH: Final = {0xFF01 + offset: 0x21 + offset for offset in range(94)}
_AROUND: Final = " \t.,;:!?\"'“”‘’「」`*。，；：！？"
_BRACKETS: Final = {("(", ")"), ("[", "]"), ("{", "}")}


def read_choice(text: str) -> str | Reason:
    """Read the one option that ``text`` names, as an upper-case letter or a digit; otherwise say why there is none."""
    stripped = text.strip(" *_`$\"'\n\t")
    match = _CHOICE.match(stripped)
    if match is None:
        return Reason.AMBIGUOUS if _TWO_OPENLY.search(stripped) else Reason.NOT_A_CHOICE
    choice = (match["bracketed"] or match["marked"] or match["bare"]).upper()
    rest = stripped[match.end() :]
    if _DENIED.match(rest):
        return Reason.NOT_A_CHOICE
    second = _SECOND_CHOICE.match(rest)
    corrected = _CORRECTED.match(rest)
    others = {found["other"].upper() for found in (second, corrected) if found}
    others |= {other.upper() for other in _ANOTHER_BRACKETED.findall(rest)}
    return choice if others <= {choice} else Reason.AMBIGUOUS


def fold_text(text: str) -> str:
    """Fold what two spellings of the same text may differ in; a text of punctuation alone stays what it is."""
    folded = unicodedata.normalize("NFC", text).translate(_INVISIBLE).translate(_FULL_WIDTH).casefold()
    folded = " ".join(unicodedata.normalize("NFC", folded).split())
    bare = folded.strip(_AROUND)
    while len(bare) > 1 and (bare[0], bare[-1]) in _BRACKETS and not any(mark in bare[1:-1] for mark in "()[]{}"):
        bare = bare[1:-1].strip(_AROUND)
    return bare or folded
