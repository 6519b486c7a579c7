"""Fuzz the judge: random completions against every answer type, none of which may raise, hang or be wrongly correct.

What: inputs from three sources with a recorded seed: random characters of all Unicode planes (lone surrogates and
controls included), random joins of the pieces that extraction and the grammars look for, and mutations (cut, doubled,
swapped, overwritten spans) of the golden cases. What must hold: every input gets a judgement within the limit of one
answer, and none of the first two sources is correct (the expected answers hold numbers and words that they do not
produce; a choice is one character, which chance does). A mutated golden case may still be right.
Reported: inputs per second, the slowest, and the statuses.

    python benchmarks/answers_fuzz.py --inputs 100000 --seed 1
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from routing_lab.answers import ANSWER_TYPES, AnswerType, Judge, Status

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "answers" / "golden.yaml"
LIMIT_S = 2.0
EXPECTED: dict[AnswerType, str] = {
    "integer": "918273645546372819",
    "rational": "918273645/546372819",
    "decimal": "918273645.54",
    "expression": r"\frac{\zeta^7+918273645}{\Xi+546372819}",
    "choice": "Q",
    "text": "only this very text, once",
}
PIECES = (
    *(
        "Answer:",
        "the answer is ",
        "\\boxed{",
        "}",
        "{",
        "####",
        "答案是",
        "<think>",
        "</think>",
        "\n",
        " ",
        "$",
        "**",
        "\\(",
    ),
    *(
        "\\)",
        "5",
        "12",
        "1,234",
        "0.5",
        ".",
        ",",
        "-",
        "+",
        "*",
        "/",
        "^",
        "!",
        "=",
        "<",
        "\\le ",
        "%",
        "|",
        "(",
        ")",
        "[",
        "]",
    ),
    *("\\{", "\\}", "\\frac{1}{2}", "\\frac", "\\sqrt{", "\\sqrt", "\\sin ", "\\log_2 ", "\\pi", "e", "i", "x", "y"),
    *(
        "x^2",
        "n!",
        "_1",
        "\\pm ",
        "\\infty",
        "\\cup",
        "\\in",
        "\\text{ or }",
        " or ",
        " and ",
        "\\text{cm}",
        "million",
        "1e3",
    ),
    *("10^", "½", "²", "\u2212", "(B)", "\\begin{pmatrix}", "&", "\\\\", "\\end{pmatrix}", "\\left", "\\right", "\\,"),
    *("\ud800", "\x00", "<|im_end|>", "\u200b"),
)


def random_characters(rng: random.Random) -> str:
    """Join characters of all planes, the dense ones more often."""
    planes = (0x80, 0x250, 0x3000, 0x10000, 0x110000)
    return "".join(chr(rng.randrange(rng.choice(planes))) for _ in range(rng.randrange(60)))


def random_pieces(rng: random.Random) -> str:
    """Join what the judge looks for."""
    return "".join(rng.choice(PIECES) for _ in range(rng.randrange(1, 25)))


def mutated(rng: random.Random, text: str) -> str:
    """Cut, double, turn around or overwrite a few spans."""
    for _ in range(rng.randrange(1, 5)):
        first, last = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        span = text[first:last]
        replacement = rng.choice(("", span * 2, span[::-1], rng.choice(PIECES), random_characters(rng)))
        text = (text[:first] + replacement + text[last:])[:5_000]
    return text


@dataclass(frozen=True, slots=True)
class Case:
    """One input; ``impossible`` when nothing that its source produces may equal the expected answer."""

    text: str
    expected: str
    answer_type: AnswerType
    places: int | None
    impossible: bool


def cases(rng: random.Random, count: int) -> Iterator[Case]:
    """Draw cases from the three sources in turn; a mutated golden case is judged against its own expected answer."""
    golden = yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))
    for number in range(count):
        if number % 4 == 3:
            seed = rng.choice(golden)
            text = mutated(rng, seed["text"])
            yield Case(text, seed["expected"], seed["type"], seed.get("places"), impossible=False)
            continue
        text = (random_characters(rng), random_pieces(rng), f"\\boxed{{{random_pieces(rng)}}}")[number % 4]
        text = text if rng.random() < 0.5 else f"Answer: {text}"
        answer_type = ANSWER_TYPES[number // 4 % len(ANSWER_TYPES)]
        places = 2 if answer_type == "decimal" else None
        yield Case(text, EXPECTED[answer_type], answer_type, places, impossible=answer_type != "choice")


def main() -> None:
    """Fuzz, and print a report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    outcomes: Counter[str] = Counter()
    slowest, slowest_text = 0.0, ""
    started = time.perf_counter()
    with Judge() as judge:
        judge.judge(r"\boxed{x}", expected="y", answer_type="expression")
        for case in cases(rng, arguments.inputs):
            begun = time.perf_counter()
            judgement = judge.judge(
                case.text,
                expected=case.expected,
                answer_type=case.answer_type,
                places=case.places,
                finish_reason=rng.choice(("stop", "length", None)),
                mode=rng.choice(("declared", "declared", "last_number")),
            )
            took = time.perf_counter() - begun
            assert not (case.impossible and judgement.status is Status.CORRECT), f"correct: {case}"
            assert took < LIMIT_S, f"{took:.2f} s: {case}"
            outcomes[f"{judgement.status}/{judgement.reason}"] += 1
            if took > slowest:
                slowest, slowest_text = took, case.text
    seconds = time.perf_counter() - started
    report = {
        "inputs": arguments.inputs,
        "seed": arguments.seed,
        "seconds": round(seconds, 1),
        "inputs_per_s": round(arguments.inputs / seconds),
        "slowest_s": round(slowest, 3),
        "slowest_text": ascii(slowest_text)[:200],
        "outcomes": dict(outcomes.most_common()),
        "python": platform.python_version(),
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
