"""What everyday-exact.yaml asks: short questions of eight kinds for chat models; every answer is computed here.

Nothing is random: the questions are the ones below, and every second one of a kind belongs to the holdout.
"""

import itertools
import math
import string
from collections.abc import Iterable, Iterator
from datetime import date, datetime, timedelta
from fractions import Fraction
from typing import TypeVar

from routing_lab.answers import AnswerType
from routing_lab.probes import Probe, ProbeSet

# How the final answer has to be declared, by type of answer.
FORMS: dict[AnswerType, str] = {
    "integer": "Close with a line of the form `Answer: N`, where N is a whole number.",
    "rational": "Close with a line of the form `Answer: F`, where F is a fraction in lowest terms or a whole number.",
    "expression": "Close with a line of the form `Answer: E`, where E is an expression in x.",
    "decimal": "Close with a line of the form `Answer: D`, where D has exactly {places} decimal places.",
    "text": "Close with a line of the form `Answer: T`, where T is only the text asked for.",
}

T = TypeVar("T")
Question = tuple[str, object, AnswerType]
"""What is asked, the computed answer, its type (`decimal` answers are fractions, shown with two places)."""


def only(values: Iterable[T]) -> T:
    """Return the single value, so that a question with two right answers cannot be asked."""
    (value,) = values
    return value


def arithmetic() -> Iterator[Question]:
    """Whole numbers and the order of operations."""
    yield "Add 4,786 and 9,547.", 4786 + 9547, "integer"
    yield "What is 73 times 48?", 73 * 48, "integer"
    yield "Take 2,689 away from 10,000.", 10_000 - 2689, "integer"
    yield "Work out 18 + 6 * (15 - 8) - 40 / 5.", 18 + 6 * (15 - 8) - 40 // 5, "integer"
    yield "What is left over when 5,000 is divided by 37?", 5000 % 37, "integer"
    yield "What is 2 to the power of 13?", 2**13, "integer"
    yield "What is 15 percent of 1,240?", only({Fraction(15, 100) * 1240}), "integer"
    yield "Compute -17 + 42 - 58 + 9.", -17 + 42 - 58 + 9, "integer"
    yield "Which number is the greatest common divisor of 252 and 198?", math.gcd(252, 198), "integer"
    yield "What is the least common multiple of 18, 24 and 40?", math.lcm(18, 24, 40), "integer"
    yield "Add up all whole numbers from 1 to 60.", sum(range(1, 61)), "integer"
    yield "What is the sum of the digits of 987 * 654?", sum(map(int, str(987 * 654))), "integer"


def fractions() -> Iterator[Question]:
    """Fractions, ratios and small probabilities."""
    yield "Add 3/8 and 5/12.", Fraction(3, 8) + Fraction(5, 12), "rational"
    yield "Multiply 14/15 by 25/21.", Fraction(14, 15) * Fraction(25, 21), "rational"
    yield "Divide 7/9 by 14/27.", Fraction(7, 9) / Fraction(14, 27), "rational"
    yield "What is 5 1/4 minus 2 5/6?", Fraction(21, 4) - Fraction(17, 6), "rational"
    yield "Write 0.4375 as a fraction.", Fraction("0.4375"), "rational"
    yield "Which fraction is the repeating decimal 0.272727...?", Fraction(27, 99), "rational"
    yield (
        "A tank is 2/3 full. A quarter of what is in it is poured out. Which fraction of the tank is full now?",
        Fraction(2, 3) * (1 - Fraction(1, 4)),
        "rational",
    )
    yield (
        "Two fair six-sided dice are thrown. What is the probability that the numbers differ by exactly 2?",
        Fraction(sum(abs(a - b) == 2 for a, b in itertools.product(range(1, 7), repeat=2)), 36),
        "rational",
    )
    yield (
        (
            "A bag holds 4 red and 6 blue marbles. Two are drawn without putting any back. "
            "What is the probability that both are blue?"
        ),
        Fraction(math.comb(6, 2), math.comb(10, 2)),
        "rational",
    )
    yield "What is 1/2 + 1/3 + 1/4 + 1/5?", sum(Fraction(1, n) for n in range(2, 6)), "rational"
    yield (
        "Pipe A fills a pool in 6 hours, pipe B fills it in 9 hours. How many hours do both together need?",
        1 / (Fraction(1, 6) + Fraction(1, 9)),
        "rational",
    )
    yield "What is the square of 2 1/3?", Fraction(7, 3) ** 2, "rational"


def algebra() -> Iterator[Question]:
    """Equations and expressions; every solution is found by trying all candidates."""
    whole = range(-500, 501)
    yield "Solve 7x - 19 = 3x + 41 for x.", only(x for x in whole if 7 * x - 19 == 3 * x + 41), "integer"
    yield (
        "Two numbers have the sum 54 and the difference 16. What is the larger one?",
        only(x for x in whole if 54 - x < x and x - (54 - x) == 16),
        "integer",
    )
    yield (
        "Which positive number x satisfies x^2 - 5x - 84 = 0?",
        only(x for x in range(1, 501) if x * x - 5 * x - 84 == 0),
        "integer",
    )
    yield (
        "A line goes through the points (2, 5) and (6, 17). What is its y-value at x = 11?",
        only({5 + Fraction(17 - 5, 6 - 2) * (11 - 2)}),
        "integer",
    )
    yield (
        "In five years Mara will be twice as old as Jon is then. Today their ages add up to 50. How old is Mara today?",
        only(m for m in range(51) if m + 5 == 2 * (50 - m + 5)),
        "integer",
    )
    yield "Solve 2^(x+3) = 256 for x.", only(x for x in range(64) if 2 ** (x + 3) == 256), "integer"
    yield (
        "If 3x + 2y = 31 and x - y = 2 for whole numbers x and y, what is x * y?",
        only(x * y for x, y in itertools.product(range(-50, 51), repeat=2) if 3 * x + 2 * y == 31 and x - y == 2),
        "integer",
    )
    yield "Find x if 5(x - 2)/3 = 7.", 7 * Fraction(3, 5) + 2, "rational"
    # Equivalent expressions are equal answers: "expand ..." could be answered by repeating the question.
    yield (
        "What is the derivative of (x + 4)(2x - 3) with respect to x?",
        derivative(expanded((1, 4), (2, -3))),
        "expression",
    )
    yield (
        "Which factor has to be multiplied by (x - 3) to give 2x^2 + x - 21?",
        only(
            f"{a}*x {b:+d}"
            for a, b in itertools.product(range(-50, 51), repeat=2)
            if expanded((1, -3), (a, b)) == (2, 1, -21)
        ),
        "expression",
    )
    yield (
        "An arithmetic sequence starts with 7, 11, 15. What is its 40th term?",
        list(itertools.islice(itertools.count(7, 4), 40))[-1],
        "integer",
    )
    yield (
        "Three consecutive odd numbers add up to 117. What is the largest?",
        only(n + 4 for n in range(1, 500, 2) if n + n + 2 + n + 4 == 117),
        "integer",
    )


def expanded(first: tuple[int, int], second: tuple[int, int]) -> tuple[int, int, int]:
    """Coefficients of x^2, x and 1 in the product of two factors, each given as (coefficient of x, constant)."""
    (a, b), (c, d) = first, second
    return a * c, a * d + b * c, b * d


def derivative(quadratic: tuple[int, int, int]) -> str:
    """The derivative of a quadratic, given by its coefficients, written out."""
    square, linear, _ = quadratic
    return f"{2 * square}*x {linear:+d}"


def counting() -> Iterator[Question]:
    """How many; every case is listed and counted."""
    yield (
        "How many whole numbers from 1 to 200 are divisible by 3 but not by 4?",
        sum(n % 3 == 0 and n % 4 != 0 for n in range(1, 201)),
        "integer",
    )
    yield (
        "In how many orders can the letters of the word LEVEL be written? Equal letters are not told apart.",
        len(set(itertools.permutations("LEVEL"))),
        "integer",
    )
    yield (
        "How many groups of 3 can be chosen out of 9 people?",
        sum(1 for _ in itertools.combinations(range(9), 3)),
        "integer",
    )
    yield (
        "How many three-digit numbers have three different digits?",
        sum(len(set(str(n))) == 3 for n in range(100, 1000)),
        "integer",
    )
    yield (
        "How many ways are there to pay 50 cents with coins of 5, 10 and 20 cents?",
        sum(5 * a + 10 * b + 20 * c == 50 for a, b, c in itertools.product(range(11), range(6), range(3))),
        "integer",
    )
    yield "How many prime numbers lie between 50 and 100?", sum(is_prime(n) for n in range(50, 101)), "integer"
    yield (
        "At a meeting of 12 people everybody shakes hands with everybody else once. How many handshakes are there?",
        sum(1 for _ in itertools.combinations(range(12), 2)),
        "integer",
    )
    yield "How many divisors does 360 have, 1 and 360 included?", sum(360 % n == 0 for n in range(1, 361)), "integer"
    yield (
        "How many different outcomes with at least two heads are there when a coin is tossed five times in a row?",
        sum(tosses.count("H") >= 2 for tosses in itertools.product("HT", repeat=5)),
        "integer",
    )
    yield (
        "How often does the digit 7 appear when all whole numbers from 1 to 100 are written down?",
        "".join(map(str, range(1, 101))).count("7"),
        "integer",
    )
    yield (
        (
            "A path on a grid goes from the lower left corner to a point 4 steps right and 3 steps up, with steps "
            "to the right and up only. How many such paths are there?"
        ),
        len(set(itertools.permutations("RRRRUUU"))),
        "integer",
    )
    yield (
        "How many squares of any size are there on a 5 by 5 chessboard?",
        sum((5 - size + 1) ** 2 for size in range(1, 6)),
        "integer",
    )


def is_prime(n: int) -> bool:
    """Tell whether ``n`` is prime, by trial division."""
    return n > 1 and all(n % divisor for divisor in range(2, math.isqrt(n) + 1))


def dates() -> Iterator[Question]:
    """Calendar and clock."""
    yield (
        "How many days lie between 14 March 2023 and 2 November 2023? Count the last day, but not the first.",
        (date(2023, 11, 2) - date(2023, 3, 14)).days,
        "integer",
    )
    yield "Which day of the week was 29 February 2016?", weekday(date(2016, 2, 29)), "text"
    yield (
        "Which date is 100 days after 1 January 2025? Write it as YYYY-MM-DD.",
        (date(2025, 1, 1) + timedelta(days=100)).isoformat(),
        "text",
    )
    yield (
        "A train leaves at 22:47 and arrives at 06:15 the next morning. How many minutes does the journey take?",
        minutes_between("2024-05-01 22:47", "2024-05-02 06:15"),
        "integer",
    )
    yield "How many days does February 2100 have?", (date(2100, 3, 1) - date(2100, 2, 1)).days, "integer"
    yield (
        "Today is Tuesday. Which day of the week will it be in 200 days?",
        weekday(only(day for day in week_of(2024) if weekday(day) == "Tuesday") + timedelta(days=200)),
        "text",
    )
    yield (
        "Which day of the year (1 January is day 1) is 9 October 2024?",
        date(2024, 10, 9).timetuple().tm_yday,
        "integer",
    )
    yield (
        "A film of 137 minutes begins at 19:50. At what time does it end? Write it as HH:MM.",
        (datetime(2024, 5, 1, 19, 50) + timedelta(minutes=137)).strftime("%H:%M"),  # noqa: DTZ001 - a clock on a wall
        "text",
    )
    yield (
        "How many Fridays are there in March 2024?",
        sum(date(2024, 3, day).weekday() == 4 for day in range(1, 32)),
        "integer",
    )
    yield (
        "How many leap years are there from 1996 to 2024, both included?",
        sum((date(year, 3, 1) - date(year, 2, 28)).days == 2 for year in range(1996, 2025)),
        "integer",
    )
    yield (
        "How many seconds are there in 2 days, 3 hours and 25 minutes?",
        seconds(days=2, hours=3, minutes=25),
        "integer",
    )
    yield (
        "Somebody was born on 17 August 1985. How many full years old is that person on 3 May 2031?",
        only(age for age in range(100) if date(1985 + age, 8, 17) <= date(2031, 5, 3) < date(1986 + age, 8, 17)),
        "integer",
    )


def week_of(year: int) -> list[date]:
    """The first seven days of a year."""
    return [date(year, 1, day) for day in range(1, 8)]


def weekday(day: date) -> str:
    """The English name of the day, whatever the locale of this machine."""
    return ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")[day.weekday()]


def minutes_between(start: str, end: str) -> int:
    """Whole minutes between two times of one place."""
    return seconds(of=datetime.fromisoformat(end) - datetime.fromisoformat(start)) // 60


def seconds(of: timedelta = timedelta(), **parts: int) -> int:
    """Whole seconds of a duration."""
    return int((of + timedelta(**parts)).total_seconds())


def units() -> Iterator[Question]:
    """Conversions; all factors are exact by definition."""
    yield "How many metres are 3.75 kilometres?", Fraction("3.75") * 1000, "integer"
    yield "How many millilitres are 2 1/4 litres?", Fraction(9, 4) * 1000, "integer"
    yield (
        "A car drives 90 kilometres per hour. How many metres per second is that?",
        Fraction(90 * 1000, 3600),
        "integer",
    )
    yield "Convert 68 degrees Fahrenheit to degrees Celsius.", Fraction(68 - 32) * Fraction(5, 9), "integer"
    yield "How many square centimetres are 0.6 square metres?", Fraction("0.6") * 100**2, "integer"
    yield "How many inches are 7 feet 5 inches?", 7 * 12 + 5, "integer"
    yield "How many centimetres are 12 inches, when an inch is 2.54 cm?", 12 * Fraction("2.54"), "decimal"
    yield "How many cubic centimetres are in a cube with edges of 0.4 metres?", Fraction(40) ** 3, "integer"
    yield "A parcel weighs 3 kilograms and 85 grams. How many grams is that?", 3 * 1000 + 85, "integer"
    yield "How many bits are 3 kibibytes (1 kibibyte is 1,024 bytes)?", 3 * 1024 * 8, "integer"
    yield (
        "Cheese costs 18.50 per kilogram. What do 350 grams cost? Round to cents, half a cent up.",
        Fraction(math.floor(Fraction("18.50") * Fraction(350, 1000) * 100 + Fraction(1, 2)), 100),
        "decimal",
    )
    yield "An angle has 4.5 degrees. How many minutes of arc is that?", Fraction("4.5") * 60, "integer"


def sorting() -> Iterator[Question]:
    """Order among numbers and words."""
    numbers = "Sort these numbers from small to large and separate them with commas, without spaces: {}."
    yield numbers.format("41, 7, 93, 28, 66, 15"), joined(sorted([41, 7, 93, 28, 66, 15])), "text"
    yield numbers.format("-3, 12, -8, 0, 5, -1"), joined(sorted([-3, 12, -8, 0, 5, -1])), "text"
    yield (
        "Sort these words alphabetically and separate them with commas, without spaces: pear, apple, plum, fig, peach.",
        joined(sorted(["pear", "apple", "plum", "fig", "peach"])),
        "text",
    )
    yield "Which is the third largest of 58, 91, 17, 84, 76, 39?", sorted([58, 91, 17, 84, 76, 39])[-3], "integer"
    yield "What is the median of 23, 5, 17, 42, 8, 31, 12?", sorted([23, 5, 17, 42, 8, 31, 12])[3], "integer"
    yield "Sort the letters of the word PROBLEM alphabetically.", "".join(sorted("PROBLEM")), "text"
    yield "Write the digits of 5830274 from large to small.", "".join(sorted("5830274", reverse=True)), "text"
    yield (
        "Which of the fractions 3/7, 5/12, 4/9, 2/5 is the largest?",
        max(Fraction(3, 7), Fraction(5, 12), Fraction(4, 9), Fraction(2, 5)),
        "rational",
    )
    yield (
        "Sort by length, shortest first, and separate with commas, without spaces: river, sea, mountain, lake, island.",
        joined(sorted(["river", "sea", "mountain", "lake", "island"], key=len)),
        "text",
    )
    yield (
        (
            "Bubble sort goes once from left to right over 5, 2, 9, 1, 6 and swaps neighbours that are out of order. "
            "Which list results? Separate the numbers with commas, without spaces."
        ),
        joined(one_bubble_pass([5, 2, 9, 1, 6])),
        "text",
    )
    yield (
        (
            "Ann is taller than Bea. Carl is shorter than Bea. Dora is taller than Ann. "
            "Write the four initials from the shortest to the tallest, without separators."
        ),
        only("".join(order) for order in itertools.permutations("ABCD") if shorter_first(order)),
        "text",
    )
    yield (
        "How many pairs of neighbours have to be swapped at least to sort 3, 1, 4, 2?",
        inversions([3, 1, 4, 2]),
        "integer",
    )


def joined(values: Iterable[object]) -> str:
    """The values with commas between them."""
    return ",".join(map(str, values))


def one_bubble_pass(values: list[int]) -> list[int]:
    """The list after one pass of bubble sort."""
    values = list(values)
    for place in range(len(values) - 1):
        if values[place] > values[place + 1]:
            values[place], values[place + 1] = values[place + 1], values[place]
    return values


def shorter_first(order: tuple[str, ...]) -> bool:
    """Whether an order from short to tall agrees with what is said of Ann, Bea, Carl and Dora."""
    place = {name: index for index, name in enumerate(order)}
    return place["B"] < place["A"] < place["D"] and place["C"] < place["B"]


def inversions(values: list[int]) -> int:
    """Pairs in the wrong order: the swaps of neighbours that sorting needs."""
    return sum(first > second for first, second in itertools.combinations(values, 2))


def strings() -> Iterator[Question]:
    """Letters and words."""
    yield "Write the word GARDEN backwards.", "GARDEN"[::-1], "text"
    yield "How many times does the letter S appear in the word POSSESSIONS?", "POSSESSIONS".count("S"), "integer"
    yield (
        "Shift every letter of the word CLOUD three places forward in the alphabet (after Z comes A).",
        shifted("CLOUD", 3),
        "text",
    )
    yield "Which letter is the 9th of the word CALCULATION?", "CALCULATION"[8], "text"
    yield "Remove all vowels (A, E, I, O, U) from the word EDUCATION.", without("EDUCATION", "AEIOU"), "text"
    yield "Write every second letter of the word TRANSPORT, beginning with the first.", "TRANSPORT"[::2], "text"
    yield (
        "How many letters are there in this sentence, without spaces and punctuation: The old clock stopped at noon.",
        sum(letter in string.ascii_letters for letter in "The old clock stopped at noon."),
        "integer",
    )
    yield (
        "Write the initials of these words in their order as one word: quiet uncles invent lovely tunes.",
        "".join(word[0] for word in ["quiet", "uncles", "invent", "lovely", "tunes"]),
        "text",
    )
    yield "Write the decimal number 45 in binary.", f"{45:b}", "text"
    yield "How many different letters does the word MISSISSIPPI have?", len(set("MISSISSIPPI")), "integer"
    yield "Swap the first and the last letter of the word PLANET.", "T" + "PLANET"[1:-1] + "P", "text"
    yield (
        "Let A be 1, B be 2 and so on to Z = 26. What is the sum of the letters of the word HOUSE?",
        sum(string.ascii_uppercase.index(letter) + 1 for letter in "HOUSE"),
        "integer",
    )


def shifted(word: str, places: int) -> str:
    """Caesar's cipher on capital letters."""
    return "".join(string.ascii_uppercase[(string.ascii_uppercase.index(c) + places) % 26] for c in word)


def without(word: str, letters: str) -> str:
    """The word without the given letters."""
    return "".join(c for c in word if c not in letters)


KINDS = (arithmetic, fractions, algebra, counting, dates, units, sorting, strings)


def probe(kind: str, number: int, question: Question) -> Probe:
    """Turn a question into a probe; odd numbers are gate probes, even ones holdout."""
    asked, answer, answer_type = question
    places = 2 if answer_type == "decimal" else None
    written = f"{float(Fraction(str(answer))):.2f}" if answer_type == "decimal" else str(answer)
    return Probe(
        id=f"{kind}-{number:02d}",
        prompt=f"{asked}\n\n{FORMS[answer_type].format(places=places)}",
        answer=written,
        type=answer_type,
        split="gate" if number % 2 else "holdout",
        places=places,
        tags=(kind,),
    )


def build() -> ProbeSet:
    """All questions as one probe set."""
    return ProbeSet(
        name="everyday-exact",
        prompt="chat",
        max_tokens=2048,
        source={"script": "probes/make_everyday.py", "answers": "computed by the script"},
        items=tuple(
            probe(kind.__name__, number, question) for kind in KINDS for number, question in enumerate(kind(), start=1)
        ),
    )
