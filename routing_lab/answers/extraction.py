r"""From a completion to its declared answer: one pure function, total on arbitrary text, linear in its length.

Rules, each written once:

1.  *Reasoning is no answer.* ``<think>…</think>`` (also ``<thinking>``, ``<seed:think>``, ``[THINK]``) is dropped. A
    closing tag without an opening one means that the chat template had opened it: all before it is reasoning. An
    unclosed tag leaves no answer, even when one was declared before it: the model had gone back to thinking.
2.  *The turn ends at an end-of-turn token* (``<|im_end|>``, ``</s>`` …) that the runtime left in the text.
3.  *Declarations* are ``\boxed{…}`` (or ``\fbox{…}``) with balanced braces; ``Answer:``, ``answer is`` and their kin,
    anywhere in a line and in any case; ``#### …``; ``答案`` forms; a heading that says only "Final Answer".
4.  *The last declaration counts*, by where it begins; what stands inside a box is part of that box. What a line
    declares runs to the line's end, or is the next line that has something on it when the rest of the line is empty.
5.  *Boxes of one sentence belong together*: ``\boxed{3} or \boxed{4}`` declares ``3 or 4``, not ``4``.
6.  *A cut-off box is no answer*, whatever was declared before it, unless a later line declares again.
7.  *A line that the token budget may have cut is no answer*: with ``finish_reason="length"`` a declaration by line that
    touches the end of the text may be half a number. A closed box is complete.
8.  "The answer is correct/verified/consistent" confirms an earlier declaration and is none itself.
9.  ``####`` is also Markdown's level-4 heading: it declares when it begins like a number or is the text's last line.
10. *Markup is not part of an answer*: emphasis, ``$…$``, ``\(…\)``, ``\text{…}``, a pair of quotes, one full stop.

Every regular expression here is free of backtracking beyond a constant (possessive quantifiers, bounded gaps). No group
is possessive, here or in the other files: Python before 3.11.5 matches such a group wrongly (python/cpython#106052).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from routing_lab.answers.judgement import Extraction, ExtractionMode, FinishReason, Reason

__all__ = ["extract", "strip_markup"]

_THINK_TAG: Final = re.compile(r"<(/?)(?:seed:)?think(?:ing)?>|\[(/?)think\]", re.IGNORECASE)

_END_OF_TURN: Final = re.compile(
    r"<\|(?:im_end|endoftext|end_of_text|eot_id|eom_id|end|return|eos)\|>|</s>|<end_of_turn>|<｜end▁of▁sentence｜>",
)

_LINE_DECLARATION: Final = re.compile(
    r"""
    (?<![a-z0-9]) answers? (?![a-z0-9])
      (?: [ \t*_"']*+ (?: \( [^()\n]{0,40} \) [ \t*_]*+ )? [:：=]          # Answer:  **Answer**:  Answer (in cm):
        | (?: [ ]+ (?: to | for ) [ ]+ [^.:\n]{1,60}? )?                  # the answer to the question is
          [ \t*_]++ (?P<verb> is | are | would[ ]be | should[ ]be | must[ ]be | will[ ]be ) (?![a-z0-9]) [ \t]*+ [:：]?
      )
    | 答案 (?: 应该 | 应当 | 就 )? [是为為]?+ [ \t*]*+ [:：]?+ (?<! 答案 )
    | (?: ^ | (?<= [\n。，,]) ) [ \t*]*+ 答 [ \t*]*+ [:：]
    | ^ [ \t#*_]*+ (?: the [ ] )? (?: final [ ] )? answer [ \t*_]*+ $    # a heading of its own
    | ^ [ \t]*+ (?P<hashes> \#{4} ) (?! \# )
    """,
    re.IGNORECASE | re.VERBOSE | re.MULTILINE,
)

_CONFIRMATION: Final = re.compile(
    r"[\s*_:]*+(?:indeed |also |therefore |thus )?(?:correct|verified|confirmed|consistent|reasonable|valid)(?![\w])",
    re.IGNORECASE,
)

_NUMBER_START: Final = re.compile(r"[\s*_$\\(\[{]*+[-+−–]?[$€£¥]?\.?[0-9](?![0-9]{0,3}[.)]\s+[^\W\d_])")

_BOX_OR_BRACE: Final = re.compile(r"\\(?:boxed|fbox)\s*+\{|\\[{}\\]|[{}]")

_BOX_CONNECTOR: Final = re.compile(
    r"[\s$.)\\\]]{0,12}(?P<word>,?\s*(?:and|or)\b|[,;、，]|和|或)[\s$(\[\\]{0,12}(?:[A-Za-z]\s?=\s?)?[\s$]{0,4}",
)

_LAST_NUMBER: Final = re.compile(
    r"(?:(?<![\w)\]])[-+−])?[$€£¥]?(?:[0-9]++(?:,[0-9]{3})*(?:\.[0-9]++)?|\.[0-9]++)(?:[eE][-+]?[0-9]++)?(?:/[0-9]++)?%?",
)

# Between a marker and its content: blanks, emphasis, and the opening line of a display or a code block.
_LEADING_NOISE: Final = re.compile(r"(?:[\s*:：]|__|(?:\$\$|\\\[|```[a-z]{0,10})[ \t]*+\n|(?<=\n)[#>]++)*")

_MOST_JOINED_BOXES: Final = 16
_LONGEST_CONNECTOR: Final = 60


@dataclass(frozen=True, slots=True)
class _Declaration:
    """Where a declaration begins, where its content is, and how it was made."""

    start: int
    content: str
    kind: Literal["box", "open_box", "line"]
    complete: bool


def extract(
    text: str,
    *,
    finish_reason: FinishReason | None = None,
    mode: ExtractionMode = "declared",
    thinking_open: bool = False,
) -> Extraction:
    """Read the final answer that a completion declares.

    Args:
        text: The completion, without the prompt; any string, lone surrogates and NUL included.
        finish_reason: ``"length"`` when the token budget ended the text. ``None`` (unknown) reads like ``"stop"``,
            except that an unclosed ``<think>`` then counts as cut by the budget, its usual cause.
        mode: ``"declared"``, or ``"last_number"`` where a probe set asks for it.
        thinking_open: The chat template has already opened the reasoning, so the text begins inside it.

    Returns:
        The answer as written, stripped of markup; or the reason why there is none. Never raises on any ``text``.
    """
    visible, inside_reasoning = _without_reasoning(text, thinking_open=thinking_open)
    cut = finish_reason == "length"
    if inside_reasoning:
        return Extraction(None, Reason.UNCLOSED_REASONING if finish_reason == "stop" else Reason.BUDGET)
    end = _END_OF_TURN.search(visible)
    if end:
        visible, cut = visible[: end.start()], False
    return _last_number(visible, cut=cut) if mode == "last_number" else _declared(visible, cut=cut)


def _without_reasoning(text: str, *, thinking_open: bool) -> tuple[str, bool]:
    """Return what follows the reasoning, and whether the text ends inside it (rule 1).

    Nesting is not counted: a model that writes about its tags while thinking does not open a second level, and one
    closing tag ends the reasoning.
    """
    inside, visible_from = thinking_open, 0
    pieces: list[str] = []
    for tag in _THINK_TAG.finditer(text):
        closing = tag.group(1) or tag.group(2)
        if closing:
            if not inside:
                pieces.clear()
            inside, visible_from = False, tag.end()
        elif not inside:
            pieces.append(text[visible_from : tag.start()])
            inside = True
    if inside:
        return "", True
    pieces.append(text[visible_from:])
    # A line break keeps what stood before the reasoning from growing together with what follows it.
    return "\n".join(pieces), False


def _declared(text: str, *, cut: bool) -> Extraction:
    """Apply rules 3 to 8 to text without reasoning."""
    found = _last_declaration(text)
    if found is None:
        return Extraction(None, Reason.BUDGET if cut else Reason.NO_DECLARATION)
    if found.kind == "open_box":
        return Extraction(None, Reason.BUDGET if cut else Reason.TRUNCATED_BOX)
    if cut and not found.complete:
        return Extraction(None, Reason.BUDGET)
    answer = strip_markup(found.content)
    return Extraction(answer) if answer else Extraction(None, Reason.EMPTY_DECLARATION)


def _last_declaration(text: str) -> _Declaration | None:
    """Choose between the last box and the last line that declare something (rules 4 to 6)."""
    boxes, open_box = _boxes(text) if "\\boxed" in text or "\\fbox" in text else ([], None)
    line = _last_line_declaration(text, boxes)
    if open_box is not None and not (line and "\n" in text[open_box : line.start]):
        return _Declaration(open_box, "", "open_box", complete=False)
    box = _joined_boxes(text, boxes)
    if box is None or line is None:
        return box or line
    # "Answer: \boxed{5}" declares through the box; "\boxed{5} … Answer: 6" through the later line.
    return box if box.start >= line.start else line


def _boxes(text: str) -> tuple[list[tuple[int, int, int]], int | None]:
    """Find the outermost closed boxes (start, content start, content end), and the start of one that never closes."""
    stack: list[tuple[int, int] | None] = []
    boxes: list[tuple[int, int, int]] = []
    for token in _BOX_OR_BRACE.finditer(text, max(0, _first_box(text))):
        mark = token.group()
        if mark == "{":
            stack.append(None)
        elif mark == "}":
            opened = stack.pop() if stack else None
            if opened is not None:
                while boxes and boxes[-1][0] > opened[0]:
                    boxes.pop()
                boxes.append((opened[0], opened[1], token.start()))
        elif mark.endswith("{") and len(mark) > len("\\{"):
            stack.append((token.start(), token.end()))
    return boxes, next((opened[0] for opened in stack if opened is not None), None)


def _first_box(text: str) -> int:
    return min(at for at in (text.find("\\boxed"), text.find("\\fbox"), len(text)) if at >= 0)


def _joined_boxes(text: str, boxes: list[tuple[int, int, int]]) -> _Declaration | None:
    """Take the last box, together with those right before it that a comma, ``and`` or ``or`` ties to it (rule 5)."""
    if not boxes:
        return None
    start, content_start, content_end = boxes[-1]
    content = text[content_start:content_end]
    near = boxes[-_MOST_JOINED_BOXES:]
    for (earlier, inner_start, inner_end), (later, _, _) in zip(reversed(near[:-1]), reversed(near), strict=False):
        between = text[inner_end + 1 : later] if later - inner_end <= _LONGEST_CONNECTOR else ""
        tie = _BOX_CONNECTOR.fullmatch(between)
        if not tie:
            break
        content = f"{text[inner_start:inner_end]} {tie['word'].strip(', ') or ','} {content}"
        start = earlier
    return _Declaration(start, content, "box", complete=True)


def _last_line_declaration(text: str, boxes: list[tuple[int, int, int]]) -> _Declaration | None:
    """Find the last marker outside every box; confirmations and Markdown headings are passed over (rules 8 and 9)."""
    last: re.Match[str] | None = None
    spans: Iterator[tuple[int, int, int]] = iter(boxes)
    span = next(spans, None)
    for marker in _LINE_DECLARATION.finditer(text):
        while span and span[2] < marker.start():
            span = next(spans, None)
        if span and span[0] < marker.start():
            continue
        if marker["verb"] and (last or boxes) and _CONFIRMATION.match(text, marker.end()):
            continue
        if marker["hashes"] and not _hashes_declare(text, marker.end()):
            continue
        last = marker
    if last is None:
        return None
    begin = _LEADING_NOISE.match(text, last.end())
    content_start = begin.end() if begin else last.end()
    content_end = text.find("\n", content_start)
    complete = content_end >= 0
    content = text[content_start : content_end if complete else len(text)]
    return _Declaration(last.start(), content, "line", complete)


def _hashes_declare(text: str, at: int) -> bool:
    if _NUMBER_START.match(text, at):
        return True
    line_end = text.find("\n", at)
    return line_end < 0 or not text[line_end : line_end + 2_000].strip()


def _last_number(text: str, *, cut: bool) -> Extraction:
    """Take the last number of the text, for probe sets that ask for it."""
    last = None
    for last in _LAST_NUMBER.finditer(text):  # noqa: B007 - only the last one matters
        pass
    if last is None:
        return Extraction(None, Reason.BUDGET if cut else Reason.NO_DECLARATION)
    if cut and last.end() == len(text):
        return Extraction(None, Reason.BUDGET)
    return Extraction(last.group())


_WRAPPERS: Final = (
    ("$$", "$$"),
    ("$", "$"),
    ("\\(", "\\)"),
    ("\\[", "\\]"),
    ("`", "`"),
    ('"', '"'),
    ("'", "'"),
    ("“", "”"),
    ("‘", "’"),
    ("「", "」"),
    ("_", "_"),
)
_COMMAND_WRAPPER: Final = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|mbox|boxed|fbox|operatorname|displaystyle)\s*+\{",
)
_ROUNDS: Final = 12
_PLAIN: Final = re.compile(r"[0-9A-Za-z]++")


def strip_markup(content: str) -> str:
    r"""Take off what surrounds an answer without being part of it (rule 10), outermost first, in bounded rounds.

    A ``$`` comes off in pairs only, since one alone is a currency; a closing bracket comes off when nothing opened it
    (the answer was declared inside a parenthesis). ``...`` is not a full stop.
    """
    if _PLAIN.fullmatch(content):
        return content
    for _ in range(_ROUNDS):
        before = content
        content = _strip_ends(content.strip())
        content = _strip_pair(content)
        content = _strip_unopened(content)
        if content == before:
            break
    return content


def _strip_ends(content: str) -> str:
    content = content.removeprefix("**").removesuffix("**").removeprefix("*") if content.startswith("*") else content
    content = (
        content.rstrip("*")
        if content.endswith("**") or (content.endswith("*") and "*" not in content[:-1])
        else content
    )
    content = content.removesuffix("\\\\")
    if content.endswith("。") or (content.endswith(".") and not content.endswith("..")):
        content = content[:-1]
    return content.strip()


def _strip_pair(content: str) -> str:
    for left, right in _WRAPPERS:
        if len(content) >= len(left) + len(right) and content.startswith(left) and content.endswith(right):
            inner = content[len(left) : len(content) - len(right)]
            # "$3$ or $4$" and "'a' and 'b'" are not one pair around everything.
            if left not in inner and right not in inner:
                return inner.strip()
    command = _COMMAND_WRAPPER.match(content)
    if command and _closes_at_end(content, command.end()):
        return content[command.end() : -1].strip()
    return content


def _closes_at_end(content: str, at: int) -> bool:
    r"""Whether the last character closes the brace opened right before ``at`` (``\{`` and ``\}`` are no braces)."""
    depth = 1
    for token in _BOX_OR_BRACE.finditer(content, at):
        mark = token.group()
        if mark == "}":
            depth -= 1
            if depth == 0:
                return token.end() == len(content)
        elif mark == "{" or len(mark) > len("\\{"):
            depth += 1
    return False


def _strip_unopened(content: str) -> str:
    r"""Drop a closer at the end that nothing opened: ``(Answer: 5)`` declares ``5``, ``[0, 1)`` keeps its bracket."""
    if (
        content.endswith(("\\)", "\\]"))
        and not content.startswith("\\")
        and "\\(" not in content
        and "\\[" not in content
    ):
        return content[:-2].strip()
    if content.endswith("$") and content.count("$") == 1:
        return content[:-1].strip()
    if content.endswith((")", "]", "}")) and not content.endswith(("\\}", "\\)", "\\]")):
        openers = sum(content.count(mark) for mark in "([{")
        closers = sum(content.count(mark) for mark in ")]}")
        if closers > openers:
            return content[:-1].strip()
    return content
