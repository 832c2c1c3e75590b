"""The last calls of a rank: a ring of fixed size in a file, written by the rank, read when it hangs or is gone."""

import re
from pathlib import Path

SLOT = 128  # bytes of one call: its number, when, `>` entered or `<` left, and the function; padded, with a newline


LINE = re.compile(r"^(\d{12}) (\d+\.\d{6}) ([<>]) (.*?)\s*$")


def read_calls(path: Path) -> list[str]:
    """The calls of a ring in their order, oldest first: `>` entered, `<` left; a slot half-written is left out."""
    data = path.read_bytes()
    slots = (data[i : i + SLOT].decode("utf-8", "replace").rstrip("\n") for i in range(0, len(data), SLOT))
    found = [match for slot in slots if (match := LINE.match(slot))]
    return [f"{m[2]} {m[3]} {m[4]}" for m in sorted(found, key=lambda m: int(m[1]))]
