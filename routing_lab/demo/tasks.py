"""The exact-answer tasks the demo model is trained for: question, scratchpad, answer.

Every problem is short (a prompt and a completion of at most 48 characters together with the
end-of-sequence token), so that a gate over dozens of them takes seconds. About one question in
ten is *held out* by a hash of its prompt: training skips it, gates and tests draw from it.
"""

import hashlib
import random
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass

__all__ = ["KINDS", "Problem", "fresh_problems", "generate", "is_held_out", "training_problems"]

HELD_OUT_PERCENT = 10
TWO_DIGIT_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class Problem:
    """One question with its only right answer.

    Attributes:
        kind: One of `KINDS`.
        prompt: The exact raw text given to the model, ending in a newline.
        answer: What must follow ``Answer: `` in the model's output.
        answer_type: ``"integer"`` for numbers, ``"text"`` where leading zeros or letters count.
        scratchpad: The steps the model writes before its answer; empty for some kinds.
    """

    kind: str
    prompt: str
    answer: str
    answer_type: str
    scratchpad: str

    @property
    def completion(self) -> str:
        """The text the model is trained to write; the end-of-sequence token follows it."""
        return f"{self.scratchpad}Answer: {self.answer}"


def _digits(number: int, width: int) -> list[int]:
    """Return `width` decimal digits of `number`, least significant first."""
    return [number // 10**place % 10 for place in range(width)]


def _number(rng: random.Random) -> int:
    """Draw the digit count first, so that two-digit numbers are not one in ten."""
    return rng.randint(10, 99) if rng.random() < TWO_DIGIT_SHARE else rng.randint(100, 999)


def _addition(rng: random.Random) -> Problem:
    first, second = _number(rng), _number(rng)
    carry, steps = 0, []
    width = max(len(str(first)), len(str(second)))
    for a, b in zip(_digits(first, width), _digits(second, width), strict=True):
        total = a + b + carry
        steps.append(f"{a}+{b}+{carry}={total:02d};")
        carry = total // 10
    prompt = f"Q: {first}+{second}=?\n"
    return Problem("addition", prompt, str(first + second), "integer", "".join(steps))


def _subtraction(rng: random.Random) -> Problem:
    first, second = _number(rng), _number(rng)
    if first < second:
        first, second = second, first
    borrow, steps = 0, []
    width = len(str(first))
    for a, b in zip(_digits(first, width), _digits(second, width), strict=True):
        difference = a - b - borrow
        next_borrow = int(difference < 0)
        # Written like a sum: first the borrow for the next place, then the digit that stays.
        steps.append(f"{a}-{b}-{borrow}={next_borrow}{difference % 10};")
        borrow = next_borrow
    prompt = f"Q: {first}-{second}=?\n"
    return Problem("subtraction", prompt, str(first - second), "integer", "".join(steps))


def _multiplication(rng: random.Random) -> Problem:
    first, second = _number(rng), rng.randint(2, 9)
    carry, steps = 0, []
    for a in _digits(first, len(str(first))):
        total = a * second + carry
        steps.append(f"{a}*{second}+{carry}={total:02d};")
        carry = total // 10
    prompt = f"Q: {first}*{second}=?\n"
    return Problem("multiplication", prompt, str(first * second), "integer", "".join(steps))


def _reversal(rng: random.Random) -> Problem:
    # No letter twice: each step is then a look-up of one letter's neighbour.
    word = "".join(rng.sample(string.ascii_lowercase, rng.randint(4, 8)))
    return Problem("reversal", f"Q: reverse {word}=?\n", word[::-1], "text", "")


def _sorting(rng: random.Random) -> Problem:
    digits = "".join(rng.choices(string.digits, k=rng.randint(4, 7)))
    return Problem("sorting", f"Q: sort {digits}=?\n", "".join(sorted(digits)), "text", "")


def _counting(rng: random.Random) -> Problem:
    length = rng.randint(4, 8)
    letter, *others = rng.sample(string.ascii_lowercase, length + 1)
    places = set(rng.sample(range(length), rng.randint(0, min(5, length))))
    word = [letter if place in places else others[place] for place in range(length)]
    seen, steps = 0, []
    for character in word:
        seen += character == letter
        steps.append(f"{character}{seen}")
    prompt = f"Q: count {letter} in {''.join(word)}=?\n"
    return Problem("counting", prompt, str(seen), "integer", "".join(steps) + ";")


_GENERATORS: dict[str, Callable[[random.Random], Problem]] = {
    "addition": _addition,
    "subtraction": _subtraction,
    "multiplication": _multiplication,
    "reversal": _reversal,
    "sorting": _sorting,
    "counting": _counting,
}

KINDS: tuple[str, ...] = tuple(_GENERATORS)


def generate(kind: str, rng: random.Random) -> Problem:
    """Draw one problem of `kind`; it may be a held-out one.

    Raises:
        ValueError: `kind` is not one of `KINDS`.
    """
    if kind not in _GENERATORS:
        msg = f"unknown kind of problem {kind!r}; known: {', '.join(KINDS)}"
        raise ValueError(msg)
    return _GENERATORS[kind](rng)


def is_held_out(prompt: str) -> bool:
    """Tell whether training must never see `prompt` (about 10 % of all; stable everywhere)."""
    digest = hashlib.blake2b(prompt.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 100 < HELD_OUT_PERCENT


def fresh_problems(kind: str, n: int, seed: int) -> list[Problem]:
    """Return `n` different held-out problems of `kind`; the same seed gives the same list.

    Raises:
        ValueError: `kind` is unknown, `n` is negative, or there are fewer than `n` such problems.
    """
    if n < 0:
        msg = f"n must not be negative, got {n}"
        raise ValueError(msg)
    rng = random.Random(f"fresh {kind} {seed}")
    found: dict[str, Problem] = {}
    draws_left = 1000 + 200 * n
    while len(found) < n:
        problem = generate(kind, rng)
        if is_held_out(problem.prompt):
            found.setdefault(problem.prompt, problem)
        draws_left -= 1
        if not draws_left:
            msg = f"found only {len(found)} of {n} different held-out problems of kind {kind!r}"
            raise ValueError(msg)
    return list(found.values())


def training_problems(rng: random.Random) -> Iterator[Problem]:
    """Yield problems of all kinds in turn, for ever, without any held-out question."""
    while True:
        for kind in KINDS:
            problem = generate(kind, rng)
            while is_held_out(problem.prompt):
                problem = generate(kind, rng)
            yield problem
