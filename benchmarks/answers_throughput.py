r"""How fast the judge is, and where it disagrees with math-verify on the same cases.

What: (1) whole checks of integers (completion text to judgement) and of expressions that need the symbolic worker,
each with an answer of its own so that no cache answers; median and range over repeats after one warm-up repeat. (2) The
same cases through ``math_verify.parse`` and ``verify`` with its default limits. (3) The golden cases of the numeric
types and expressions that declare an answer: the judge's status beside math-verify's; each disagreement is listed with
the reason why the golden case is judged as it is. math-verify runs in a process of its own that is killed when a case
takes longer than ``--patience`` seconds, since its own limit does not end every case.

The ceiling: an integer check is one scan of the text and one ``int()``; an expression check cannot be faster than a
round trip through two pipes (about 50 µs) and one sympy subtraction.

    pip install math-verify; python benchmarks/answers_throughput.py
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import yaml

from routing_lab.answers import Judge, Status

GOLDEN = Path(__file__).resolve().parents[1] / "tests" / "answers" / "golden.yaml"
COMPARED = ("integer", "rational", "expression")

Case = tuple[str, str, str]
"""Completion, expected answer, answer type."""


def integer_cases(count: int) -> list[Case]:
    """Completions in the forms of the demo model and of a chat model, right and wrong in turn."""
    forms = (
        "7+6+0=13;4+8+1=13;3+0+1=04;Answer: {}",
        "First we add the numbers.\nThen we check the sum.\n\n**Final Answer:** ${}$",
        "Adding them gives \\boxed{{{}}}.",
        "The answer is {:,}.",
    )
    return [(forms[n % len(forms)].format(1000 + n), str(1000 + n + n % 2), "integer") for n in range(count)]


def expression_cases(count: int) -> list[Case]:
    """Expressions that are equal but written differently, and every other one different by one."""
    forms = (
        ("{n}x^2+{m}x+{n}", "{n}(x^2+1)+{m}x"),
        (r"\frac{{{n}x+{m}}}{{3}}", r"\frac{{{n}x}}{{3}}+\frac{{{m}}}{{3}}"),
        (r"{n}\sqrt{{{m}}}+1", r"1+\sqrt{{{n}^2\cdot{m}}}"),
        (r"(x+{n})^2", "x^2+{d}x+{s}"),
    )
    cases = []
    for number in range(count):
        given, expected = forms[number % len(forms)]
        values = {"n": number + 2, "m": number + 3, "d": 2 * number + 4, "s": (number + 2) ** 2}
        extra = "+1" if number // len(forms) % 2 else ""
        cases.append((rf"\boxed{{{given.format(**values)}{extra}}}", expected.format(**values), "expression"))
    return cases


def rates(check: Callable[[Case], object], cases: list[Case], repeats: int) -> dict[str, float]:
    """Checks per second: median, lowest and highest of the repeats after one that is thrown away."""
    found = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        for case in cases:
            check(case)
        found.append(len(cases) / (time.perf_counter() - started))
    kept = found[1:]
    return {"median_per_s": round(statistics.median(kept)), "low": round(min(kept)), "high": round(max(kept))}


def math_verify_check(case: Case) -> bool:
    """One whole check with math-verify; the expected answer is boxed, as its documentation advises."""
    from math_verify import parse, verify

    text, expected, _ = case
    return bool(verify(parse(rf"\boxed{{{expected}}}"), parse(text)))


def serve_math_verify(connection: Connection) -> None:
    """Answer cases in a process that may be killed."""
    import logging

    logging.disable(logging.CRITICAL)
    while True:
        connection.send(math_verify_check(connection.recv()))


class MathVerify:
    """math-verify behind a limit that holds."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self._start()

    def _start(self) -> None:
        self.here, there = multiprocessing.Pipe()
        self.process = multiprocessing.Process(target=serve_math_verify, args=(there,), daemon=True)
        self.process.start()

    def check(self, case: Case) -> str:
        """``correct``, ``wrong``, or ``no answer`` when it did not come in time or the process died."""
        self.here.send(case)
        try:
            if self.here.poll(self.patience_s):
                return "correct" if self.here.recv() else "wrong"
        except EOFError:
            pass
        self.process.kill()
        self._start()
        return "no answer"


def disagreements(judge: Judge, other: MathVerify) -> dict[str, Any]:
    """Both on the golden cases that declare a number or an expression."""
    golden = yaml.safe_load(GOLDEN.read_text(encoding="utf-8"))
    chosen = [case for case in golden if case["type"] in COMPARED and case["status"] != "no_final_answer"]
    chosen = [case for case in chosen if not {"extract", "finish_reason", "thinking_open"} & set(case)]
    found = []
    for case in chosen:
        ours = judge.judge(case["text"], expected=case["expected"], answer_type=case["type"])
        theirs = other.check((case["text"], case["expected"], case["type"]))
        if theirs != ("correct" if ours.status is Status.CORRECT else "wrong"):
            shown = {key: case[key] for key in ("type", "expected", "text", "why")}
            found.append({**shown, "judge": ours.status, "math_verify": theirs})
    return {"cases": len(chosen), "agree": len(chosen) - len(found), "disagreements": found}


def main() -> None:
    """Measure, compare, and print a report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--integers", type=int, default=4_000)
    parser.add_argument("--expressions", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--patience", type=float, default=8.0, help="seconds that math-verify gets for one case")
    parser.add_argument("--skip-math-verify", action="store_true")
    arguments = parser.parse_args()
    # One core for the judge, its worker and math-verify alike.
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    integers, expressions = integer_cases(arguments.integers), expression_cases(arguments.expressions)
    with Judge() as judge:

        def check(case: Case) -> object:
            return judge.judge(case[0], expected=case[1], answer_type=case[2])

        report: dict[str, Any] = {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "sympy": version("sympy"),
            "cases": {"integers": len(integers), "expressions": len(expressions), "repeats": arguments.repeats},
            "judge": {
                "integers": rates(check, integers, arguments.repeats),
                "expressions": rates(check, expressions, arguments.repeats),
            },
        }
        if not arguments.skip_math_verify:
            report["math_verify_version"] = version("math-verify")
            report["math_verify"] = {
                "integers": rates(math_verify_check, integers[:400], 3),
                "expressions": rates(math_verify_check, expressions, 3),
            }
            report["golden"] = disagreements(judge, MathVerify(arguments.patience))
    print(json.dumps(report, indent=2, ensure_ascii=True))


if __name__ == "__main__":
    main()
