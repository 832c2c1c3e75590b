"""The record of a run, as `Measurement.to_json()` gives it, for a terminal."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from trilane.logs.problems import Problem
from trilane.utils.tables import short

PROBLEMS = 4  # of a run that its text has
EXTENT = ("iterations", "first_iteration", "last_iteration")


def records_text(records: Sequence[dict[str, Any]]) -> str:
    """The records of runs, one below the other; of a file with several runs each with its number."""
    runs, seen, texts = Counter(values["file"] for values in records), Counter[str](), list[str]()
    for values in records:
        seen[values["file"]] += 1
        number = f", run {seen[values['file']]} of {runs[values['file']]}" if runs[values["file"]] > 1 else ""
        texts.append(record_text(values, number))
    return "\n".join(texts)


def record_text(values: dict[str, Any], number: str = "") -> str:
    """A run's record in three lines, and one for each of its first problems; `number` follows the file's name."""
    rates = ", ".join(f"{rate:.1f} TFLOP/s/GPU {name}" for name, rate in values["tflops"].items() if rate is not None)
    parts = (
        f"{values['iterations']} iterations{extent(*(values[name] for name in EXTENT))}",
        "" if values["sec_per_it"] is None else f"{values['sec_per_it']:.4g} s/it",
        rates,
        "" if values["max_memory_gib"] is None else f"{values['max_memory_gib']:.2f} GiB",
        "" if values["last_loss"] is None else f"loss {values['last_loss']:.4f}",
        *(
            f"validation loss {loss:.4f}"
            for row in values["validation"][-1:]
            if (loss := row.get("lm_loss")) is not None
        ),
    )
    numbers = ", ".join(filter(None, parts))
    wrong = [_problem(problem, values["evidence"]) for problem in values["problems"][:PROBLEMS]]
    wrong += [f"{n} more problems, which --json has"] if (n := len(values["problems"]) - PROBLEMS) > 0 else []
    basis = f", {values['status_basis']}" if values["status_basis"] else ""
    head = f"{values['file']}{number}: {values['status']} ({values['dialect']}){basis}"
    return "\n  ".join([head, *filter(None, (numbers, values["evidence"], *_places(values), *wrong))])


def extent(lines: int, first: int | None, last: int | None) -> str:
    """ " (10 to 400)": the numbers of the first and the last iteration of a log; "" where they are unknown, or those of
    its `lines` lines are 1 to `lines`."""
    return f" ({first} to {last})" if None not in (first, last) and (first, last) != (1, lines) else ""


def _problem(values: dict[str, Any], shown: str) -> str:
    """A problem, and the text of its line where that is not `shown` already."""
    text = f"\n    {short(values['evidence'])}" if values["evidence"] not in ("", shown) else ""
    return f"problem: {Problem(**values)}{text}"


def _places(values: dict[str, Any]) -> list[str]:
    """Lines with node, GPU and --exclude of an ending, and with who did not come to a collective."""
    named = (
        ("node ", ", ".join(values["hosts"])),
        ("GPU ", ", ".join(values["gpus"])),
        ("--exclude=", values["exclude"]),
    )
    where = ", ".join(word + text for word, text in named if text)
    return [values["caveat"], where, *values["collectives"]]
