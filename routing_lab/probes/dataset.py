"""Make a probe set out of a data set: a recipe says which columns hold what, a seed says which rows are taken.

Sources are data sets on the Hugging Face hub (through ``datasets``, imported only when rows are read), folders that
hold a downloaded one, and local parquet, JSON-lines and CSV files. A row becomes a probe only if its answer can be
checked exactly; every row that does not is listed with the reason.
"""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import math
import random
import re
import string
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

from routing_lab.answers import AnswerType
from routing_lab.errors import Problem, UsageError, UserFileError
from routing_lab.probes.probeset import Extract, Probe, ProbeSet, PromptStyle, Split

__all__ = [
    "MAX_FIELD_CHARACTERS",
    "RECIPES",
    "DatasetImport",
    "Recipe",
    "Rejection",
    "bare_template",
    "import_probes",
    "is_single_file",
    "load_rows",
]

MAX_FIELD_CHARACTERS = 20_000
"""Longest question or answer field that is looked at; it also bounds what a user's own regular expression runs over."""

Row = Mapping[str, Any]

_ENDING = "Work it out step by step. Then write the final answer on a line of its own, in the form `Answer: "
_NUMBER = "{question}\n\n" + _ENDING + "N`."
_BOXED = "{question}\n\n" + _ENDING + r"\boxed{...}`."
_CHOICE = "{question}\n\n{choices}\n\n" + _ENDING + "X`, where X is the letter of the right choice."

_DECLARED: Mapping[AnswerType, str] = {
    "integer": "number",
    "rational": "number",
    "decimal": "number",
    "expression": "expression",
    "choice": "letter",
    "text": "text",
}
"""What a prompt asks for behind "Answer:"."""


@dataclass(frozen=True, slots=True)
class Recipe:
    r"""How the rows of one data set become probes.

    Args:
        name: Short name; the default name of the probe set, and the start of its ids.
        hub: Data set on the Hugging Face hub, as ``owner/name``; ``config`` and ``split`` say which part of it (or of a
            folder; a single file has no parts).
        question: Column with the question.
        answer: Column with the answer: a text, a number, or for ``choices`` also the 0-based place of the right one.
        answer_type: Type of the answer; ``places`` goes with ``decimal``.
        answer_regex: Where the answer stands in its column: the last match counts, and of it group 1 (without groups,
            all of it). ``None``: the whole field.
        choices: Column with the list of choices (of a ``choice`` question); they are labelled A, B, C, ...
        template: The prompt; ``{question}`` and ``{choices}`` are replaced, other braces are left alone. ``None``: the
            question and its choices, and for ``chat`` a request to end with "Answer: ...", since only what is declared
            counts. Afterwards it is the template itself.
        prompt: ``chat``, or ``raw``: the question is then sent as it stands, blanks and line breaks at its ends too.
        max_tokens: Budget of a completion.
    """

    name: str
    question: str
    answer: str
    answer_type: AnswerType
    hub: str | None = None
    config: str | None = None
    split: str = "train"
    answer_regex: str | None = None
    choices: str | None = None
    places: int | None = None
    template: str | None = None
    prompt: PromptStyle = "chat"
    extract: Extract = "declared"
    max_tokens: int = 1024

    def __post_init__(self) -> None:
        if self.template is None:
            object.__setattr__(self, "template", bare_template(self.choices) + self._request())
        faults = [fault for fault in self._faults() if fault]
        if faults:
            raise UsageError(f"recipe {self.name}: " + "; ".join(faults))

    def _request(self) -> str:
        """The end of a prompt for which no template was given."""
        wanted = _DECLARED.get(self.answer_type, "answer")
        return "" if self.prompt == "raw" else f"\n\nEnd with 'Answer: <{wanted}>'."

    def _faults(self) -> Iterator[str]:
        if self.answer_type not in get_args(AnswerType):
            yield f"unknown answer type {self.answer_type!r}; known: {', '.join(get_args(AnswerType))}"
        if (self.places is None) == (self.answer_type == "decimal"):
            yield "decimal answers, and only they, need a number of places"
        template = self.template or ""
        if "{question}" not in template:
            yield "the template has no {question}"
        if (self.choices is not None) != ("{choices}" in template):
            yield "a column of choices and {choices} in the template go together"
        if self.answer_regex is not None:
            yield _regex_fault(self.answer_regex)


def bare_template(choices: str | None) -> str:
    """The question, with its choices where there is a column of them, and nothing else."""
    return "{question}" if choices is None else "{question}\n\n{choices}"


def _regex_fault(pattern: str) -> str:
    try:
        compiled = re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"the answer regex {pattern!r} is no regular expression: {error}"
    return f"the answer regex {pattern!r} has {compiled.groups} groups; at most one can be the answer" * (
        compiled.groups > 1
    )


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            name="gsm8k",
            hub="openai/gsm8k",
            config="main",
            split="test",
            question="question",
            answer="answer",  # a worked solution that ends with "#### 42"
            answer_regex=r"####\s*(.+)",
            answer_type="integer",
            template=_NUMBER,
        ),
        Recipe(
            name="math-500",
            hub="HuggingFaceH4/MATH-500",
            split="test",
            question="problem",
            answer="answer",
            answer_type="expression",  # the few answers in words are rejected, with their reason
            template=_BOXED,
            max_tokens=4096,
        ),
        Recipe(
            name="aime-2024",
            hub="HuggingFaceH4/aime_2024",
            split="train",
            question="problem",
            answer="answer",
            answer_type="integer",
            template=_NUMBER,
            max_tokens=16384,
        ),
        Recipe(
            name="aime-2025",
            hub="math-ai/aime25",
            split="test",
            question="problem",
            answer="answer",
            answer_type="integer",
            template=_NUMBER,
            max_tokens=16384,
        ),
        Recipe(
            name="mmlu",
            hub="cais/mmlu",
            config="all",
            split="test",
            question="question",
            choices="choices",
            answer="answer",  # 0-based place of the right choice
            answer_type="choice",
            template=_CHOICE,
        ),
        Recipe(
            name="mmlu-pro",
            hub="TIGER-Lab/MMLU-Pro",
            split="test",
            question="question",
            choices="options",
            answer="answer",  # a letter
            answer_type="choice",
            template=_CHOICE,
            max_tokens=2048,
        ),
    )
}
"""Ready recipes; columns and splits as their cards on the hub describe them (November 2026)."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """A row that could not be made into a probe.

    ``row`` counts from 0 in the source, as in the ids of probes; ``where`` is for people: the line of the file that it
    begins in (``line 3``; the header is line 1), or ``row 3`` of a source without lines, counted from 1.
    """

    row: int
    where: str
    reason: str


@dataclass(frozen=True, slots=True)
class DatasetImport:
    """A probe set made from a data set, and what was left out.

    ``examined`` of the source's ``rows`` were looked at: all of them, or as many as it took to reach the limit.
    """

    probe_set: ProbeSet
    rows: int
    examined: int
    rejections: tuple[Rejection, ...]

    def reasons(self) -> dict[str, int]:
        """How often each kind of reason occurs (the part before the first colon), most frequent first."""
        return dict(Counter(rejection.reason.partition(":")[0] for rejection in self.rejections).most_common())


def import_probes(
    source: str,
    recipe: Recipe | None = None,
    *,
    limit: int | None = None,
    seed: int = 0,
    gate_share: float = 0.5,
    name: str | None = None,
) -> DatasetImport:
    """Make a probe set from ``source``: the name of a ready recipe, ``owner/name`` on the hub, a folder or a file.

    Rows are taken in an order drawn with ``seed`` until ``limit`` probes are found (``None``: all rows). The first
    ``gate_share`` of them, rounded up, become the gate, the rest the holdout. ``recipe`` is needed for everything but
    the name of a ready one; a local file with the columns of a ready recipe can be read with ``RECIPES[...]``.

    Raises:
        UsageError: No recipe, a missing column, an option out of range, or the hub does not have the data set or
            cannot be reached.
        UserFileError: The local file is missing or unreadable, or none of its rows gives a probe.
    """
    if limit is not None and limit < 1:
        raise UsageError(f"the limit must be at least 1, got {limit}")
    if not 0 <= gate_share <= 1:
        raise UsageError(f"the share of the gate must be between 0 and 1, got {gate_share}")
    recipe = recipe or RECIPES.get(source)
    if recipe is None:
        raise UsageError(f"{source} needs column names and an answer type; ready recipes: {', '.join(RECIPES)}")
    rows = load_rows(source, recipe)
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)  # noqa: S311 - a sample, not a secret
    probes, rejections, examined = _convert(rows, order, recipe, limit, _row_names(source, len(rows)))
    if not probes:
        kinds = "; ".join(sorted({rejection.reason for rejection in rejections})[:5]) or "it has no rows"
        raise UserFileError(source, [Problem("", f"no row of {len(rows)} gives a probe: {kinds}")])
    in_gate = math.ceil(gate_share * len(probes))
    part = {} if is_single_file(source) else {"config": recipe.config, "split": recipe.split}
    origin = {
        "data set": source,
        "recipe": recipe.name,
        **{name: value for name, value in part.items() if value is not None},
        "seed": seed,
        "rows": len(rows),
        "examined": examined,
        "rejected": len(rejections),
    }
    probe_set = ProbeSet(
        name=name or recipe.name,
        prompt=recipe.prompt,
        max_tokens=recipe.max_tokens,
        extract=recipe.extract,
        source=origin,
        items=tuple(_in_split(probe, "gate" if place < in_gate else "holdout") for place, probe in enumerate(probes)),
    )
    return DatasetImport(probe_set=probe_set, rows=len(rows), examined=examined, rejections=tuple(rejections))


# ---------------------------------------------------------------------------------------------------------------------
# Rows to probes


def _convert(
    rows: list[Row], order: Iterable[int], recipe: Recipe, limit: int | None, names: list[str]
) -> tuple[list[Probe], list[Rejection], int]:
    """Probes and rejections of the rows in ``order``, and how many rows were examined."""
    probes: list[Probe] = []
    rejections: list[Rejection] = []
    row_of_prompt: dict[str, int] = {}
    for examined, row in enumerate(order):
        if len(probes) == limit:
            return probes, rejections, examined
        try:
            probe = _probe(rows[row], row, recipe)
        except _RejectedError as rejected:
            rejections.append(Rejection(row, names[row], str(rejected)))
            continue
        if (earlier := row_of_prompt.setdefault(probe.prompt, row)) != row:
            # It would be counted twice, or leak from the gate into the holdout.
            rejections.append(Rejection(row, names[row], f"same question as another row: {names[earlier]}"))
            continue
        probes.append(probe)
    return probes, rejections, len(rows)


class _RejectedError(Exception):
    """Why a row gives no probe; caught where rows are converted."""


def _probe(row: Row, index: int, recipe: Recipe) -> Probe:
    question = _field(row, recipe.question, stripped=recipe.prompt != "raw")
    choices = _choices(row, recipe)
    answer = _letter(row, recipe, choices) if choices else _answer(row, recipe)
    values = {"{question}": question, "{choices}": "\n".join(f"{letter}. {text}" for letter, text in choices.items())}
    # In one pass, so that a question that contains "{choices}" stays as it is.
    prompt = re.sub(r"\{question\}|\{choices\}", lambda match: values[match[0]], recipe.template or "")
    try:
        return Probe(
            id=f"{_slug(recipe.name)}-{index:05d}",
            prompt=prompt,
            answer=answer,
            type=recipe.answer_type,
            places=recipe.places,
        )
    except UserFileError as error:
        raise _RejectedError("; ".join(f"{problem.where} {problem.what}" for problem in error.problems)) from None


def _answer(row: Row, recipe: Recipe) -> str:
    text = _field(row, recipe.answer)
    if recipe.answer_regex is None:
        return text
    matches = list(re.finditer(recipe.answer_regex, text))
    if not matches:
        raise _RejectedError(f"no match of the answer regex: ...{text[-60:]!r}")
    found = matches[-1]
    return (found[1] if found.re.groups else found[0] or "").strip()


def _choices(row: Row, recipe: Recipe) -> dict[str, str]:
    """Letter -> text of each choice; empty for a question without choices."""
    if recipe.choices is None:
        return {}
    value = row.get(recipe.choices)
    if isinstance(value, str):  # a CSV file has no lists
        with contextlib.suppress(ValueError):
            value = json.loads(value)
    if not isinstance(value, list) or not value or not all(isinstance(text, str) for text in value):
        raise _RejectedError(f"choices are no list of texts: {value!r:.60}")
    if len(value) > len(string.ascii_uppercase) or sum(map(len, value)) > MAX_FIELD_CHARACTERS:
        raise _RejectedError(f"too many or too long choices: {len(value)}")
    if len(set(value)) < len(value):
        raise _RejectedError("two choices are the same: no single one is right")
    return dict(zip(string.ascii_uppercase, value, strict=False))


def _letter(row: Row, recipe: Recipe, choices: Mapping[str, str]) -> str:
    """The letter of the right choice, given as a letter, as a 0-based place or as the choice's own text."""
    answer = _answer(row, recipe)
    if answer in choices:
        return answer
    by_text = {text: letter for letter, text in choices.items()}
    if answer in by_text:
        return by_text[answer]
    if re.fullmatch(r"[0-9]{1,2}", answer) and int(answer) < len(choices):
        return list(choices)[int(answer)]
    raise _RejectedError(f"answer is none of the choices: {answer[:60]!r}")


def _field(row: Row, column: str, *, stripped: bool = True) -> str:
    value = row.get(column)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise _RejectedError(f"{column} is no text or number: {type(value).__name__}")
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _RejectedError(f"{column} is no finite number: {value}")
        # A column with one fraction in it turns its whole numbers into 42.0.
        value = int(value) if value.is_integer() else repr(value)
    text = str(value).strip() if stripped else str(value)
    if not text.strip():
        raise _RejectedError(f"{column} is blank")
    if len(text) > MAX_FIELD_CHARACTERS:
        raise _RejectedError(f"{column} is too long: {len(text)} characters")
    return text


def _slug(name: str) -> str:
    """The start of an id: a name may be that of any file, an id has letters, digits, dots, dashes and underscores."""
    return re.sub(r"[^A-Za-z0-9]+", "-", name).strip("-")[:80] or "row"


def _in_split(probe: Probe, split: Split) -> Probe:
    return replace(probe, split=split)


# ---------------------------------------------------------------------------------------------------------------------
# Where rows come from

_MOST_CSV_FIELD = 1 << 30  # longer ones than MAX_FIELD_CHARACTERS are rejected row by row

_FORMATS = {".parquet": "parquet", ".jsonl": "json", ".ndjson": "json", ".json": "json", ".csv": "csv", ".tsv": "csv"}


def load_rows(source: str, recipe: Recipe) -> list[Row]:
    """All rows of ``source``, with the recipe's columns. Raises as ``import_probes``."""
    path = Path(source)
    if is_single_file(source):
        return _local_rows(path, recipe)
    if path.is_dir() and source not in RECIPES:
        return _folder_rows(path, recipe)
    hub = RECIPES[source].hub if source in RECIPES else source
    if hub is None or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", hub, re.ASCII):
        raise UsageError(
            f"{source!r} is neither a file nor a data set's name; give a {', '.join(_FORMATS)} file, "
            f"owner/name on the hub, or one of {', '.join(RECIPES)}"
        )
    return _hub_rows(hub, recipe)


def is_single_file(source: str) -> bool:
    """Whether ``source`` names a file of rows: one that has no configurations and no splits."""
    path = Path(source)
    if path.is_dir():
        return False
    return path.suffix.lower() in _FORMATS or (path.exists() and source not in RECIPES)


def _row_names(source: str, rows: int) -> list[str]:
    """What messages call each row: by line of the file where lines can be told, else by number, from 1."""
    path = Path(source)
    lines = _first_lines(path, _FORMATS[path.suffix.lower()]) if is_single_file(source) else []
    # The reader of a format may leave out what we count as a row, or the other way round: then no line is surely right.
    return [f"line {line}" for line in lines] if len(lines) == rows else [f"row {row + 1}" for row in range(rows)]


def _first_lines(path: Path, kind: str) -> list[int]:
    """The line that each row of a file begins in, the first one being 1; a row of a CSV file may have several."""
    if kind == "parquet":
        return []
    with path.open(encoding="utf-8-sig", errors="replace", newline="" if kind == "csv" else None) as file:
        if kind == "json":
            return [number for number, line in enumerate(file, start=1) if line.strip()]
        begin, found = 1, []
        with _long_fields():
            for fields in (reader := csv.reader(file, delimiter=_separator(path))):
                if "".join(fields).strip() or len(fields) > 1:  # a blank line is no row
                    found.append(begin)
                begin = reader.line_num + 1
    return found[1:]


def _separator(path: Path) -> str:
    return "\t" if path.suffix.lower() == ".tsv" else ","


@contextlib.contextmanager
def _long_fields() -> Iterator[None]:
    before = csv.field_size_limit(_MOST_CSV_FIELD)
    try:
        yield
    finally:
        csv.field_size_limit(before)


def _folder_rows(path: Path, recipe: Recipe) -> list[Row]:
    """Rows of a folder as ``datasets`` understands it: the copy of a hub's repository, or files named after splits."""
    with _quiet_datasets() as datasets:
        import pyarrow as pa

        try:
            table = datasets.load_dataset(str(path), recipe.config, split=recipe.split, streaming=True)
            rows: list[Row] = [dict(row) for row in table]
        except (OSError, ValueError, KeyError, pa.ArrowException, datasets.exceptions.DatasetsError) as error:
            what = f"cannot be read as a data set: {_first_line(error)}"
            raise UserFileError(str(path), [Problem("", what, "choose with --config and --split")]) from None
    _check_columns(str(path), rows, recipe)
    return rows


def _local_rows(path: Path, recipe: Recipe) -> list[Row]:
    if not path.is_file():
        raise UserFileError(str(path), [Problem("", "is no file")])
    kind = _FORMATS.get(path.suffix.lower())
    if kind is None:
        raise UserFileError(str(path), [Problem("", f"has no known ending; known: {', '.join(_FORMATS)}")])
    with _quiet_datasets() as datasets:
        import pyarrow as pa

        try:
            options = _csv_options(path, datasets) if kind == "csv" else {}
            # Streaming reads the file in place instead of copying it into the user's cache first.
            table = datasets.load_dataset(kind, data_files=str(path), split="train", streaming=True, **options)
            rows: list[Row] = [dict(row) for row in table]
        except StopIteration:  # how the library ends on a JSON file without a line
            raise UserFileError(str(path), [Problem("", "has no rows")]) from None
        except (
            OSError,
            ValueError,
            KeyError,
            csv.Error,
            pa.ArrowException,
            datasets.exceptions.DatasetsError,
        ) as error:
            # KeyError: a column whose name holds a NUL
            raise UserFileError(str(path), [Problem("", f"cannot be read as {kind}: {_first_line(error)}")]) from None
    _check_columns(str(path), rows, recipe)
    return rows


def _csv_options(path: Path, datasets: ModuleType) -> dict[str, Any]:
    """Options under which every column is read as text: guessing types would turn 007 into 7 and 0.50 into 0.5."""
    separator = _separator(path)
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file, delimiter=separator)
        header = next(lines, [])
        if len(set(header)) < len(header) or not header:
            raise ValueError("the first line has to name every column, each once")
        # The library would take the first fields of such a line for its name, and each column for the one before.
        with _long_fields():
            too_many = any(len(fields) > len(header) for fields in lines)
    if too_many:
        what = f"line {lines.line_num} has more fields than the {len(header)} columns that the first line names"
        raise ValueError(f"{what}; a text with {separator!r} in it belongs in quotes")
    features = datasets.Features({column: datasets.Value("string") for column in header})
    return {"features": features, "keep_default_na": False, "sep": separator}


def _hub_rows(hub: str, recipe: Recipe) -> list[Row]:
    with _quiet_datasets() as datasets:
        try:
            table = datasets.load_dataset(hub, recipe.config, split=recipe.split)
        except datasets.exceptions.DatasetNotFoundError as error:
            raise UsageError(f"the hub has no data set {hub}, or it is private: {_first_line(error)}") from None
        except (ConnectionError, TimeoutError) as error:
            raise UsageError(
                f"the Hugging Face hub cannot be reached for {hub}: {_first_line(error)}; download the data set on a "
                "machine that is online and give its folder or a parquet file of it instead"
            ) from None
        except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
            raise UsageError(f"{hub} cannot be loaded from the hub: {_first_line(error)}") from None
        rows: list[Row] = [dict(row) for row in table]
    _check_columns(hub, rows, recipe)
    return rows


@contextlib.contextmanager
def _quiet_datasets() -> Iterator[ModuleType]:
    """The ``datasets`` library without log lines of its own: what goes wrong is said once, by us."""
    import datasets  # takes seconds

    before, hub = datasets.logging.get_verbosity(), logging.getLogger("huggingface_hub")
    before_hub = hub.level
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    hub.setLevel(logging.CRITICAL)
    try:
        yield datasets
    finally:
        datasets.logging.set_verbosity(before)
        hub.setLevel(before_hub)


def _check_columns(source: str, rows: list[Row], recipe: Recipe) -> None:
    wanted = [column for column in (recipe.question, recipe.answer, recipe.choices) if column is not None]
    there = list(dict.fromkeys(column for row in rows[:1] for column in row))
    missing = [column for column in wanted if column not in there]
    if rows and missing:
        raise UsageError(f"{source} has no column {', '.join(missing)}; it has {', '.join(there)}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
