"""What hard-five.yaml asks: five problems that need a long, correct chain of thought; brute force finds each answer."""

import itertools
import math
from collections import Counter
from fractions import Fraction
from functools import cache

from routing_lab.answers import AnswerType
from routing_lab.probes import Probe, ProbeSet


def tilings(rows: int, columns: int) -> int:
    """Ways to cover a board with dominoes and L-shaped pieces of three squares, cell by cell."""
    shapes = [((0, 0), (0, 1)), ((0, 0), (1, 0))]
    square = [(0, 0), (0, 1), (1, 0), (1, 1)]
    shapes += [tuple(cell for cell in square if cell != left_out) for left_out in square]

    @cache
    def ways(free: frozenset[tuple[int, int]]) -> int:
        if not free:
            return 1
        first = min(free)
        total = 0
        for shape in shapes:
            # The piece that covers the first free cell lies so that this is the first of its own cells.
            row, column = first[0] - shape[0][0], first[1] - shape[0][1]
            piece = frozenset((row + r, column + c) for r, c in shape)
            if piece <= free:
                total += ways(free - piece)
        return total

    return ways(frozenset(itertools.product(range(rows), range(columns))))


def roomy_orders(n: int, distance: int) -> int:
    """Orders of 1..n in which neighbours always differ by at least ``distance``."""
    return sum(
        all(abs(a - b) >= distance for a, b in itertools.pairwise(order))
        for order in itertools.permutations(range(1, n + 1))
    )


def square_product_chance(dice: int) -> Fraction:
    """Probability that the product of so many fair dice is a perfect square."""
    thrown = Counter(math.prod(faces) for faces in itertools.product(range(1, 7), repeat=dice))
    squares = sum(times for product, times in thrown.items() if math.isqrt(product) ** 2 == product)
    return Fraction(squares, sum(thrown.values()))


def king_steps(size: int) -> Fraction:
    """Expected moves of a king that walks at random from one corner of a square board to the opposite one."""
    cells = list(itertools.product(range(size), repeat=2))
    goal = (size - 1, size - 1)
    unknown = [cell for cell in cells if cell != goal]
    rows = []
    for cell in unknown:
        moves = [
            other for other in cells if other != cell and max(abs(other[0] - cell[0]), abs(other[1] - cell[1])) == 1
        ]
        row = [Fraction(-sum(other == target for other in moves), len(moves)) for target in unknown]
        row[unknown.index(cell)] += 1
        rows.append([*row, Fraction(1)])
    return solve(rows)[unknown.index((0, 0))]


def solve(rows: list[list[Fraction]]) -> list[Fraction]:
    """Solve a regular system of linear equations exactly; the last column is the right-hand side."""
    for column in range(len(rows)):
        pivot = next(index for index in range(column, len(rows)) if rows[index][column])
        rows[column], rows[pivot] = rows[pivot], rows[column]
        scale = rows[column][column]
        rows[column] = [value / scale for value in rows[column]]
        for index, row in enumerate(rows):
            if index != column and row[column]:
                factor = row[column]
                rows[index] = [value - factor * base for value, base in zip(row, rows[column], strict=True)]
    return [row[-1] for row in rows]


def mirror_squares_sum(limit: int) -> int:
    """Sum of the n up to ``limit`` whose square, read backwards, is the square of n read backwards."""
    return sum(n for n in range(1, limit + 1) if int(str(n * n)[::-1]) == int(str(n)[::-1]) ** 2 and n % 10)


def problem(name: str, asked: str, answer: object, answer_type: AnswerType) -> Probe:
    """One problem, with the form of its answer."""
    form = "a whole number" if answer_type == "integer" else "a fraction in lowest terms"
    prompt = f"{asked}\n\nThink it through, then close with a line of the form `Answer: N`, where N is {form}."
    return Probe(id=name, prompt=prompt, answer=str(answer), type=answer_type, tags=("hard",))


def build() -> ProbeSet:
    """The five problems as a probe set; all of them are gate probes."""
    return ProbeSet(
        name="hard-five",
        prompt="chat",
        max_tokens=16384,
        source={"script": "probes/make_hard_five.py", "answers": "found by brute force in the script"},
        items=(
            problem(
                "tilings",
                "A board of 3 rows and 6 columns is to be covered completely, without overlap, by pieces of two kinds: "
                "dominoes (two squares that share a side) and L-trominoes (a 2 by 2 block with one square missing). "
                "Pieces may be turned in any way. Coverings that are mirror images or rotations of each other count "
                "separately. How many coverings are there?",
                tilings(3, 6),
                "integer",
            ),
            problem(
                "roomy-orders",
                "In how many ways can the numbers 1, 2, ..., 8 be written in a row so that any two neighbours differ "
                "by at least 3?",
                roomy_orders(8, 3),
                "integer",
            ),
            problem(
                "square-product",
                "Six fair six-sided dice are thrown. What is the probability that the product of the six numbers is "
                "a perfect square?",
                square_product_chance(6),
                "rational",
            ),
            problem(
                "random-king",
                "A king stands on a corner square of an empty 3 by 3 chessboard. In every step it moves to one of the "
                "squares it can reach (all neighbours, diagonal ones included), each with the same probability. What "
                "is the expected number of steps until it first stands on the diagonally opposite corner?",
                king_steps(3),
                "rational",
            ),
            problem(
                "mirror-squares",
                "Write a positive whole number n that does not end in 0 backwards and call the result r(n), for "
                "example r(12) = 21. What is the sum of all such n from 1 to 200 with r(n^2) = r(n)^2? One of them is "
                "12, since 12^2 = 144 and 21^2 = 441.",
                mirror_squares_sum(200),
                "integer",
            ),
        ),
    )
