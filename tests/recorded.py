"""What is compared with what was recorded in tests/answers/, one number a line.

A number that changes is recorded again in the commit that says why, by one switch that also mends
the output shown in docs: TRILANE_RECORD=1 pytest tests/test_answers.py tests/docs.
"""

import json
import math
import os
import re
from collections.abc import Iterator
from typing import Any

from support import REPOSITORY

ANSWERS = REPOSITORY / "tests/answers"
SWITCH = "TRILANE_RECORD"
# no answers, but what was asked, or what a label names
GIVEN = {"cluster", "shape", "data", "optimizer", "dropout", "run", "sources", "calibration"}
GIVEN |= {"date", "topology", "support"}
MOST = 2  # of a list that are recorded
NUMBER = re.compile(r"\d[\d.,]*(?:e[+-]?\d+)?")
MADE_ON = re.compile(r"made by \S+ on \d{4}-\d\d-\d\d")  # the day on which the tests run
ROUNDED = re.compile(r"\d+\.\d+|[1-9]\d{0,2}(,\d{3})*,\d00")


def numbers_in(text: str) -> str:
    """The numbers of a text, in their order; none of a path, which names this repository, nor of
    the day.
    """
    return " ".join(
        NUMBER.findall(" ".join(word for word in MADE_ON.sub("", text).split() if "/" not in word))
    )


def plain(value: Any) -> Any:
    """What is compared: floats to nine digits, of sentences (four words and more) and paths their
    numbers.
    """
    if isinstance(value, dict):
        return {str(plain(k)): plain(v) for k, v in value.items() if k not in GIVEN}
    if isinstance(value, list):
        return [plain(one) for one in value[:MOST]] + [f"{len(value)} in all"] * (len(value) > MOST)
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, str) and (len(value.split()) > 3 or "/" in value):
        return f"... {numbers_in(value)}".strip()
    return value


def compare(name: str, answers: dict[str, Any]) -> None:
    """Fail where `answers` are not what tests/answers/`name`.json holds."""
    path = ANSWERS / f"{name}.json"
    before = json.loads(path.read_text())
    now = json.loads(json.dumps(answers))
    if os.environ.get(SWITCH):
        before = merged(before, now)
        path.write_text(json.dumps(before, indent=0) + "\n")
    changed = list(differences(before, now))
    again = f"{SWITCH}=1 pytest tests/test_answers.py tests/docs records it again"
    assert not changed, f"{path.relative_to(REPOSITORY)}: {changed[:3]}\n{again}"


def merged(before: Any, now: Any) -> Any:
    """What is answered now, with the recorded value wherever the two count as equal: a record
    changes only where a test would fail.
    """
    if isinstance(before, dict) and isinstance(now, dict):
        return {key: merged(before.get(key), value) for key, value in now.items()}
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return [merged(*pair) for pair in zip(before, now, strict=True)]
    return now if [*differences(before, now)] else before


def differences(before: Any, now: Any, where: str = "") -> Iterator[str]:
    """What differs, each by its place in the JSON."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from differences(
                before.get(key, "(missing)"), now.get(key, "(missing)"), f"{where}.{key}"
            )
    elif isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        for number, pair in enumerate(zip(before, now, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif (
        isinstance(before, float)
        and isinstance(now, float)
        and math.isclose(before, now, rel_tol=1e-5, abs_tol=1e-7)
    ):
        return  # fits depend on how many threads BLAS sums with, in the seventh digit
    elif (
        isinstance(before, str) and isinstance(now, str) and same_words(before.split(), now.split())
    ):
        return
    elif before != now:
        yield f"{where}: {before!r:.80} -> {now!r:.80}"


def same_words(before: list[str], now: list[str]) -> bool:
    """Whether they are equal, but for one unit of the last digit of numbers that were rounded (1.25
    or 794,000).
    """
    return len(before) == len(now) and all(
        a == b
        or (
            ROUNDED.fullmatch(a)
            and ROUNDED.fullmatch(b)
            and abs(number(a) - number(b)) < 1.01 * unit(a)
        )
        for a, b in zip(before, now, strict=True)
    )


def number(word: str) -> float:
    return float(word.replace(",", ""))


def unit(word: str) -> float:
    """Of the last digit that is no zero of thousands."""
    whole, _, decimals = word.replace(",", "").partition(".")
    return 10.0 ** (-len(decimals) or len(whole) - len(whole.rstrip("0")))
