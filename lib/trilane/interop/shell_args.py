"""The arguments in a command line or part of a script: continued lines, quotes, comments and plain
variables.
"""

import math
import re
import shlex
from collections.abc import Mapping

from trilane.utils.validation import require

# of a script, as of an argument in Linux (MAX_ARG_STRLEN): shlex takes a second for such a word
MOST_BYTES = 1 << 17
NESTED = 10  # variables within variables
END = "\0"  # marks the end of a line among the words, and so of the values of its last argument
ASSIGNED = re.compile(
    r"""(?:^|;)\s*(?:export\s+)?([A-Za-z_]\w*)="""
    r"""("(?:[^"\\]|\\.)*"|'[^']*'|\$\(\([^()]*\)\)|[^\s;&|]*)""",
    re.M | re.S,
)
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
PRODUCT = re.compile(r"\$\(\(\s*(\d{1,18}(?:\s*\*\s*\d{1,18}){0,20})\s*\)\)")  # $((16*4*2))
OTHER = re.compile(rf"{END}|\|\|?|&&?|;|\d?>.*")  # what comes after is another command's, or a file
OPTION = re.compile(r"--([^\s=]*)(\s|=|)(.*)", re.S)


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
        option = OPTION.fullmatch(word)
        if option and len(word) > 2:
            name = option[1].replace("-", "_")
            if option[2].isspace():
                # "--fp8-format hybrid" in a list is one word, which bash cuts where it is used
                given[name] = [part.strip("'\"") for part in option[3].split()]
            else:
                given[name] = [option[3]] if option[3] else []
        elif not name or OTHER.fullmatch(word) or re.match(r"-(?![\d.])", word):
            name = ""
        elif given[name] and re.fullmatch(r"[\w./-]+\.py", word):
            # the launcher's arguments end: torchrun --nproc_per_node 8 pretrain_gpt.py
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
    values = {name: _unquoted(value) for name, value in ASSIGNED.findall(text)}
    text = ASSIGNED.sub(lambda match: "\n" + _unquoted(match[2]).replace("\n", "\f"), text)
    text = text.replace("\n", f"\n{END} ").replace("\f", "\n")  # but not within quotes
    for _ in range(NESTED):
        text = _replaced(text, values)
    return PRODUCT.sub(lambda match: str(math.prod(map(int, match[1].split("*")))), text)


def _without_heredocs(text: str) -> str:
    """The text without its here-documents, which are other files; one that does not end is left."""
    lines = text.split("\n")
    last = {line.strip(" \t"): number for number, line in enumerate(lines)}
    kept: list[str] = []
    end = ""
    for number, line in enumerate(lines):
        if end:
            if line.strip(" \t") == end:
                end = ""
            continue
        for match in re.finditer(r"<<-?[ \t]*(['\"]?)(\w+)\1", line):
            if last.get(match[2], 0) > number:
                line = line[: match.start()]
                end = match[2]
                break
        kept.append(line)
    return "\n".join(kept)


def _replaced(text: str, values: Mapping[str, str]) -> str:
    """The text with its variables replaced once; ValueError where a=$b$b, b=$c$c, ... makes it
    endless.
    """
    length = len(text)

    def value(match: re.Match[str]) -> str:
        nonlocal length
        new = values.get(match[1] or match[2], match[0])
        length += len(new)
        rule = "its value is too long: variables within variables"
        require(length <= 2 * MOST_BYTES, "arguments", match[0], rule)
        return new

    return VARIABLE.sub(value, text)


def _split_commands(words: list[str]) -> list[str]:
    """The words, with a quoted command (`bash -c "..."`) split into its own words if its quotes
    close.
    """
    split: list[str] = []
    before = ""
    for word in words:
        parts = [word]
        if before == "-c":
            try:
                parts = [*shlex.split(word), END]
            except ValueError:
                parts = [word]
        split += parts
        before = word
    return split


def _unquoted(value: str) -> str:
    """An assigned value without the quotes around it; quotes within it are kept."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if is_quoted else value
