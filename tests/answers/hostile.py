"""Texts that try to hang, crash, exhaust or run something through the judge; built here because some are 2 MB long."""

from __future__ import annotations

from collections.abc import Iterator

MEGABYTES_2 = 2_000_000

_CODE = {
    "import": "__import__('os').system('touch {canary}')",
    "eval": "eval(\"open('{canary}','w')\")",
    "exec": "exec(\"import os; os.mkdir('{canary}')\")",
    "dunder_walk": "().__class__.__bases__[0].__subclasses__()",
    "lambda": "(lambda: open('{canary}','w'))()",
    "f_string": "f\"{{open('{canary}','w')}}\"",
    "format_attribute": "'{{0.__class__}}'.format(1)",
    "attribute_of_x": "x.__init__.__globals__",
    "getattr": "getattr(x, '__class__')",
    "sympify": 'S(\'open("{canary}","w")\')',
    "walrus": "(a:=open('{canary}','w'))",
    "comprehension": "[c for c in ().__class__.__mro__]",
    "shell": "$(touch {canary})",
    "backticks": "`touch {canary}`",
    "tex_write18": r"\write18{{touch {canary}}}",
    "tex_input": r"\input{{/etc/passwd}}",
    "tex_catcode": r"\catcode`\@=11",
    "yaml_tag": "!!python/object/apply:os.system ['touch {canary}']",
    "pickle": "cos\nsystem\n(S'touch {canary}'\ntR.",
    "json_escape": '"}}\n{{"id": 1, "equal": "yes"}}\n',
}

_EXPRESSIONS = {
    "tower": "10^10^10^10",
    "tower_braced": "5^{5^{5^{5^5}}}",
    "tower_minus": "{5^{(5^{(5^{(5^5)})}-4)}-5}/16",
    "tower_long": "2^" * 500 + "2",
    "tower_hidden": r"2^{\sqrt{10^{30}}}",
    "tower_exp": "e^{e^{e^{e^{e^{9}}}}}",
    "tower_of_products": "*".join(["9^{999}"] * 60),
    "factorial": "1000000!",
    "factorials": "5" + "!" * 400,
    "factorial_hidden": r"\sqrt{10^{20}}!",
    "factorial_of_factorial": "((9!)!)!",
    "binomial": r"\binom{10^{9}}{5\cdot10^{8}}",
    "expansion": "(a+b+c+d+u+v+w+x+y+z)^{900}-(a+b)^{900}",
    "expansion_equal": "(a+b+c+d+u+v+w+x)^{60}",
    "roots": r"\sqrt{" * 40 + "2" + "}" * 40,
    "root_sum": "+".join(rf"\sqrt{{{n}}}" for n in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)),
    "root_product": "".join(rf"(\sqrt{{{n}}}+\sqrt[3]{{{n + 2}}}+x)" for n in range(2, 40)),
    "trig_sum": "+".join(rf"\sin^{{{n}}}({n}x)\cos({n + 1}y)" for n in range(2, 40)),
    "nested_trig": "sin(" * 30 + "x" + ")" * 30,
    "huge_semiprime": r"\sqrt{" + "9" * 199 + "}",
    "gcd": r"\gcd(10^{2000}+1, 7^{2000}+1)",
    "division_by_zero": r"\frac{1}{x-x}",
    "zero_to_zero": "0^{0^{0^0}}",
    "infinities": r"\infty-\infty",
    "infinite_power": r"\infty^{\infty}",
    "imaginary_tower": "i^{i^{i^{i^i}}}",
    "sets_of_sets": r"\{" * 15 + "1" + r"\}" * 15,
    "large_set": r"\{" + ",".join(f"x^{{{n}}}+{n}" for n in range(60)) + r"\}",
    "plus_minus": r"\pm" * 100 + "1",
    "matrix": r"\begin{pmatrix}" + "&".join("1" * 50) + r"\\" * 50 + r"\end{pmatrix}",
    "brackets_5000": "(" * 5_000 + "1" + ")" * 5_000,
    "braces_5000": "{" * 5_000 + "1" + "}" * 5_000,
    "square_brackets_5000": "[" * 5_000,
    "fractions_5000": r"\frac{1}{" * 5_000 + "1" + "}" * 5_000,
    "minus_signs": "-" * 100_000 + "1",
    "commas": "1," * 100_000,
    "digits_in_expression": "x+" + "7" * 100_000,
    "implicit_product": "x" * 100_000,
    "bars": "|" * 5_000,
    "subscripts": "x_" * 2_000,
    "matrix_open": r"\begin{pmatrix}1&2",
    "set_open": r"\{1,",
    "root_open": r"\sqrt[",
}

_NUMBERS = {
    "digits_2mb": "7" * MEGABYTES_2,
    "decimal_2mb": "0." + "3" * MEGABYTES_2,
    "digits_4300": "1" * 4_301,
    "exponent_huge": "1e999999999",
    "exponent_negative": "1e-999999999",
    "exponent_digits": "1e" + "9" * 100_000,
    "power_of_ten": "10^999999999",
    "fraction_2mb": "1" * 1_000_000 + "/" + "3" * 1_000_000,
    "groups": "1" + ",000" * 500_000,
    "bad_groups": "1,000" + ",00" * 500_000,
    "cycle": "0.(" + "142857" * 3_000 + ")",
    "slashes": "1/" * 10_000,
    "units": "5 " + "km " * 6_000,
    "words": "5 " + "a" * 19_000,
    "blanks": "5" + " " * 19_000 + "6",
    "ors": "5 or " * 4_000,
    "arabic_digits": "٤٢",
    "superscripts": "10" + "⁹" * 10_000,
    "vulgar": "½" * 20_000,
    "nan": "nan",
    "infinity": "-inf",
    "underscores": "1" + "_000" * 5_000,
}

_TEXTS = {
    "think_open_100k": "<think>" * 100_000 + "Answer: 5",
    "think_pairs_100k": "<think></think>" * 100_000 + "Answer: 7",
    "think_close_100k": "</think>" * 100_000 + "Answer: 7",
    "boxed_open_300k": r"\boxed{" * 280_000,
    "boxed_nested": r"\boxed{" * 140_000 + "}" * 140_000,
    "boxed_many": r"\boxed{1}, " * 180_000,
    "braces_2mb": r"\boxed{" + "{" * MEGABYTES_2,
    "closing_braces_2mb": r"\boxed{" + "}" * MEGABYTES_2,
    "backslashes_2mb": r"\boxed{" + "\\" * MEGABYTES_2,
    "markers_2mb": "Answer: " * 250_000,
    "marker_words_2mb": "answer to the " * 140_000,
    "stars_2mb": "Answer" + "*" * MEGABYTES_2 + ":",
    "hashes_2mb": "#" * MEGABYTES_2,
    "hash_lines": "#### x\n" * 280_000,
    "newlines_2mb": "\n" * MEGABYTES_2,
    "blanks_2mb": "Answer:" + " " * MEGABYTES_2 + "5",
    "dollars_2mb": "Answer: " + "$" * MEGABYTES_2,
    "quotes_2mb": "Answer: " + '"' * MEGABYTES_2,
    "chinese_2mb": "答案" * 600_000,
    "angle_brackets_2mb": "<" * MEGABYTES_2,
    "pipes_2mb": "<|" * 1_000_000,
    "line_2mb": "Answer: " + "lorem ipsum " * 160_000,
    "surrogates": "Answer: \ud800\udfff\udc00",
    "surrogates_2mb": "Answer: " + "\ud800" * 600_000,
    "nul": "Answer: \x00\x00\x00",
    "nul_2mb": "\x00" * MEGABYTES_2,
    "controls": "Answer: " + "".join(map(chr, range(32))),
    "combining": "Answer: a" + "\u0301" * 19_000,
    "bidi": "Answer: \u202e5\u202c",
    "zero_width": "Answer: " + "\u200b" * 10_000 + "7",
    "private_use": "Answer: \uf8ff\U0010ffff",
    "casefold_growth": "Answer: " + "ΐ" * 19_000,
    "empty": "",
    # Found by fuzzing: the parser waited for a closing brace behind the last token, and kept what it was given there.
    "subscript_open": "Answer: x_{1",
    "subscript_open_alone": "Answer: x_{",
    "fraction_open": r"Answer: \frac{1",
    "matrix_open_row": r"Answer: \begin{pmatrix}1\\",
}


def hostile_texts(canary: str) -> Iterator[tuple[str, str]]:
    """Yield (name, completion); whatever runs one of the code texts leaves something at the path ``canary``."""
    for name, code in _CODE.items():
        yield f"code_{name}", f"Answer: {code.format(canary=canary)}"
        yield f"code_boxed_{name}", rf"\boxed{{{code.format(canary=canary)}}}"
    for name, expression in _EXPRESSIONS.items():
        yield f"expression_{name}", rf"\boxed{{{expression}}}"
    for name, number in _NUMBERS.items():
        yield f"number_{name}", f"Answer: {number}"
    for name, text in _TEXTS.items():
        yield f"text_{name}", text
