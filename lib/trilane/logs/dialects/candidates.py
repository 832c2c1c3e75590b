"""The lines of a log that look most like iterations, which a refusal shows."""

import re
from pathlib import Path

from trilane.logs.reading.blocks import blocks
from trilane.utils.tables import printable
from trilane.utils.validation import shown

WORDS = (re.compile(rb"(?i)step|iter|update|batch|\bitr?\b"), re.compile(rb"(?i)loss|nll|\bce\b|xent|entropy|ppl"))
NUMBERED = re.compile(rb"(?i)(?:step|\bit|iter\w*|update|batch)\W{1,4}(?:no\. )?(\d{1,15})(?![\d.:])")
MOST = 1 << 18  # bytes that are searched


def numbered(path: Path) -> tuple[int, int, bytes]:
    """Of the lines with a loss in the first bytes of a log those that number most iterations, alike but for digits: how
    many numbers, and number and text of the first line."""
    found = dict[bytes, tuple[set[bytes], int, bytes]]()
    for number, line in enumerate(next(blocks(path), b"")[:MOST].splitlines(), 1):
        if len(line) < 2000 and WORDS[1].search(line) and (numbers := NUMBERED.findall(line)):
            found.setdefault(_form(line), (set(), number, line))[0].update(numbers)
    most, number, line = max(found.values(), key=lambda entry: len(entry[0]), default=(set(), 0, b""))
    return len(most), number, line


def _form(line: bytes) -> bytes:
    return b" ".join(re.sub(rb"\d[\d.,]*(?:[eE][-+]?\d+)?", b"0", line).split())


def advice(path: Path) -> str:
    """The three likeliest lines, and where it stands how to read them; "" where none looks like an iteration.

    Lines that differ in their numbers only count as one, and are the likelier the more there are.
    """
    found = dict[bytes, list[tuple[int, bytes]]]()
    for number, line in enumerate(next(blocks(path), b"")[:MOST].splitlines(), 1):
        if len(line) < 2000 and re.search(rb"\d", line) and any(word.search(line) for word in WORDS):
            found.setdefault(_form(line), []).append((number, line))
    score = {key: (sum(bool(word.search(key)) for word in WORDS), min(len(found[key]), 100)) for key in found}
    likely = [found[key][0] for key in sorted(found, key=score.__getitem__, reverse=True)[:3]]
    text = [f"    {number}: {shown(line.decode('utf-8', 'replace').strip(), 160)}" for number, line in likely]
    guide = "  docs/guides/my-logs.md shows how a table of your own reads them"
    return "\n".join(map(printable, ["  these lines look most like iterations:", *text, guide])) if text else ""
