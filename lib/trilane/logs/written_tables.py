"""Tables that people typed: the cells of Markdown and CSV, with the numbers of their lines."""

import csv
import re
from collections.abc import Sequence

Table = tuple[list[str], list[tuple[int, list[str]]]]  # header; rows by the number of their line
RULE = re.compile(r"[\s:|-]*-[\s:|-]*")  # the line below a header of Markdown
SUFFIXES = (".csv", ".md")  # of files that hold tables of rows


def tables(lines: Sequence[str], suffix: str) -> list[Table]:
    """Each table of a file with that suffix; raises ValueError for what is no CSV. A cell holds no
    line end.
    """
    if suffix != ".csv":
        return _markdown_tables(lines)
    try:
        every = list(enumerate(csv.reader(lines), 1))
    except csv.Error as error:  # a cell of more than 131072 characters
        raise ValueError(f"table={error}: is no CSV") from None
    rows = [(line, row) for line, row in every if row and not row[0].startswith("#")]
    return [(rows[0][1], rows[1:])] if rows else []


def _markdown_tables(lines: Sequence[str]) -> list[Table]:
    tables: list[Table] = []
    before = ""
    is_inside = False
    for number, line in enumerate(lines, 1):
        is_inside &= "|" in line
        if is_inside:
            tables[-1][1].append((number, _cells(line)))
        elif "|" in line and "|" in before and RULE.fullmatch(line):
            tables.append((_cells(before), []))
            is_inside = True
        before = line
    return tables


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().removeprefix("|").removesuffix("|").split("|")]
