"""The arguments in a command line or part of a script: continued lines, quotes, comments and plain variables."""

import math
import re
import shlex
from collections.abc import Mapping

from trilane.utils.validation import require

ASSIGNED = re.compile(
    r"""(?:^|;)\s*(?:export\s+)?([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|'[^']*'|\$\(\([^()]*\)\)|[^\s;&|]*)""", re.M | re.S
)

VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
COMMENT = re.compile(r"^[ \t]*#.*\n?", re.M)  # also one that ends with a backslash, which does not continue a comment
HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1")
TRACED = re.compile(r"^\++ ", re.M)  # prefix of a command in `bash -x`
OPERATOR = re.compile(r"\|\|?|&&?|;|\d?>.*")  # what comes after it is another command's, or a file's name
GIVEN = re.compile(r"([^\s=]*)(\s|=|)(.*)", re.S)  # the name of an argument and what follows it in the same word
NUMBER = re.compile(r"-[\d.]")
PROGRAM = re.compile(r"[\w./-]+\.py")
PRODUCT = re.compile(r"\$\(\(\s*(\d{1,18}(?:\s*\*\s*\d{1,18}){0,20})\s*\)\)")  # $((16*4*2))
MAX_DEPTH = 10  # of variables within variables
MOST_BYTES = 1 << 17  # of a script, as of an argument in Linux (MAX_ARG_STRLEN): shlex takes a second for such a word
MOST_CHARACTERS = 2 * MOST_BYTES
END = "\0"  # marks the end of a line among the words, and so of the values of its last argument


def read_arguments(text: str) -> dict[str, list[str]]:
    """Each `--name` with its values, dashes as underscores; the last of a repeated name counts.

    A variable that the text does not assign is left unchanged. Raises ValueError for unclosed quotes.
    """
    text = COMMENT.sub("", _without_heredocs(text))
    text = TRACED.sub("", text.replace("\\\n", " "))
    known = {name: _unquoted(value) for name, value in ASSIGNED.findall(text)}
    text = ASSIGNED.sub(lambda found: "\n" + _unquoted(found[2]).replace("\n", "\f"), text)
    text = text.replace("\n", f"\n{END} ").replace("\f", "\n")  # but not within quotes
    for _ in range(MAX_DEPTH):
        text = _expanded(text, known)
    text = PRODUCT.sub(lambda found: str(math.prod(int(number) for number in found[1].split("*"))), text)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ValueError(f"arguments=unreadable: not a command line ({error})") from None
    given: dict[str, list[str]] = {}
    name = ""
    for word in _split_commands(words):
        if word.startswith("--") and len(word) > 2:
            name, sign, value = GIVEN.fullmatch(word[2:]).groups()  # type: ignore[union-attr]
            name = name.replace("-", "_")
            # "--fp8-format hybrid" in a list is one word, which bash cuts where it is used
            cut = [part.strip("'\"") for part in value.split()]
            given[name] = cut if sign.isspace() else [value] if value else []
        elif word == END or OPERATOR.fullmatch(word):
            name = ""
        elif name and given[name] and PROGRAM.fullmatch(word):
            name = ""  # the launcher's arguments end: torchrun --nproc_per_node 8 pretrain_gpt.py
        elif name and (not word.startswith("-") or NUMBER.match(word)):
            given[name].append(word)
        else:
            name = ""
    return given


def _without_heredocs(text: str) -> str:
    """The text without its here-documents, which are other files; one that does not end is left."""
    lines = text.split("\n")
    last = {line.strip(" \t"): number for number, line in enumerate(lines)}
    kept, number = list[str](), 0
    while number < len(lines):
        line = lines[number]
        found = next((f for f in HEREDOC.finditer(line) if last.get(f[2], 0) > number), None)
        kept.append(line[: found.start()] if found else line)
        number += 1
        while found and lines[number - 1].strip(" \t") != found[2]:
            number += 1
    return "\n".join(kept)


def _expanded(text: str, known: Mapping[str, str]) -> str:
    """The text with its variables replaced once; ValueError where a=$b$b, b=$c$c, ... makes it endless."""
    length = len(text)

    def value(found: re.Match[str]) -> str:
        nonlocal length
        new = known.get(found[1] or found[2], found[0])
        length += len(new)
        require(length <= MOST_CHARACTERS, "arguments", found[0], "its value is too long: variables within variables")
        return new

    return VARIABLE.sub(value, text)


def _split_commands(words: list[str]) -> list[str]:
    """The words, with a quoted command (`bash -c "..."`) split into its own words if its quotes close."""
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
