"""The arguments in a command line or part of a script: continued lines, quotes, comments and plain
variables.
"""

import math
import re
import shlex
from collections.abc import Mapping

from trilane.utils.validation import require

MOST_BYTES = (
    1 << 17
)  # of a script, as of an argument in Linux (MAX_ARG_STRLEN): shlex takes a second for such a word
END = "\0"  # marks the end of a line among the words, and so of the values of its last argument


def read_arguments(text: str) -> dict[str, list[str]]:
    """Each `--name` with its values, dashes as underscores; the last of a repeated name counts.

    A variable that the text does not assign is left unchanged. Raises ValueError for unclosed
    quotes.
    """
    text = _expanded(text)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ValueError(f"arguments=unreadable: not a command line ({error})") from None
    given: dict[str, list[str]] = {}
    name = ""
    for word in _split_commands(words):
        if word.startswith("--") and len(word) > 2:
            name, sign, value = re.fullmatch(r"([^\s=]*)(\s|=|)(.*)", word[2:], re.S).groups()  # type: ignore[union-attr]
            name = name.replace("-", "_")
            # "--fp8-format hybrid" in a list is one word, which bash cuts where it is used
            cut = [part.strip("'\"") for part in value.split()]
            given[name] = cut if sign.isspace() else [value] if value else []
        elif (
            not name
            or re.fullmatch(
                rf"{END}|\|\|?|&&?|;|\d?>.*", word
            )  # what comes after is another command's, or a file's
            # the launcher's arguments end: torchrun --nproc_per_node 8 pretrain_gpt.py
            or (given[name] and re.fullmatch(r"[\w./-]+\.py", word))
            or (word.startswith("-") and not re.match(r"-[\d.]", word))
        ):
            name = ""
        else:
            given[name].append(word)
    return given


def _expanded(text: str) -> str:
    """The text without comments and here-documents, with END before each line, with the values of
    its variables.
    """
    # a comment that ends with a backslash does not continue; `bash -x` puts "+ " before a command
    text = re.sub(r"(?m)^[ \t]*#.*\n?", "", _without_heredocs(text))
    text = re.sub(r"(?m)^\++ ", "", text.replace("\\\n", " "))
    assigned = re.compile(
        r"""(?:^|;)\s*(?:export\s+)?([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|'[^']*'|\$\(\([^()]*\)\)|[^\s;&|]*)""",
        re.M | re.S,
    )
    known = {name: _unquoted(value) for name, value in assigned.findall(text)}
    text = assigned.sub(lambda found: "\n" + _unquoted(found[2]).replace("\n", "\f"), text)
    text = text.replace("\n", f"\n{END} ").replace("\f", "\n")  # but not within quotes
    for _ in range(10):  # variables within variables
        text = _replaced(text, known)
    product = r"\$\(\(\s*(\d{1,18}(?:\s*\*\s*\d{1,18}){0,20})\s*\)\)"  # $((16*4*2))
    return re.sub(
        product, lambda found: str(math.prod(int(number) for number in found[1].split("*"))), text
    )


def _without_heredocs(text: str) -> str:
    """The text without its here-documents, which are other files; one that does not end is left."""
    lines, kept, end = text.split("\n"), list[str](), ""
    last = {line.strip(" \t"): number for number, line in enumerate(lines)}
    for number, line in enumerate(lines):
        if end:
            end = "" if line.strip(" \t") == end else end
            continue
        found = re.finditer(r"<<-?[ \t]*(['\"]?)(\w+)\1", line)
        begin = next((f for f in found if last.get(f[2], 0) > number), None)
        kept.append(line[: begin.start()] if begin else line)
        end = begin[2] if begin else ""
    return "\n".join(kept)


def _replaced(text: str, known: Mapping[str, str]) -> str:
    """The text with its variables replaced once; ValueError where a=$b$b, b=$c$c, ... makes it
    endless.
    """
    length = len(text)

    def value(found: re.Match[str]) -> str:
        nonlocal length
        new = known.get(found[1] or found[2], found[0])
        length += len(new)
        rule = "its value is too long: variables within variables"
        require(length <= 2 * MOST_BYTES, "arguments", found[0], rule)
        return new

    return re.sub(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))", value, text)


def _split_commands(words: list[str]) -> list[str]:
    """The words, with a quoted command (`bash -c "..."`) split into its own words if its quotes
    close.
    """
    found: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        try:
            found += [*shlex.split(word), END] if before == "-c" else [word]
        except ValueError:
            found.append(word)
    return found


def _unquoted(value: str) -> str:
    """An assigned value without the quotes around it; quotes within it are kept."""
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
