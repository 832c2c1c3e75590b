"""A command line, or a piece of a script, as arguments: continued lines, quotes, comments and plain variables."""

import math
import re
import shlex

ASSIGNED = re.compile(
    r"""(?:^|;)\s*(?:export\s+)?([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|'[^']*'|\$\(\([^()]*\)\)|[^\s;&|]*)""", re.M | re.S
)

VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
COMMENT = re.compile(r"^[ \t]*#.*\n?", re.M)  # also one that ends with a backslash, which continues nothing there
HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n.*?^[ \t]*\2[ \t]*$", re.M | re.S)  # a file, written in passing
TRACED = re.compile(r"^\++ ", re.M)  # what bash -x puts before a command
NUMBER = re.compile(r"-[\d.]")
PRODUCT = re.compile(r"\$\(\(\s*(\d+(?:\s*\*\s*\d+)*)\s*\)\)")  # $((16*4*2))
DEEP = 10  # variables within variables
END = "\0"  # of a line, among the words: what follows is no value of the line's last argument


def read_arguments(text: str) -> dict[str, list[str]]:
    """Each `--name` with its values, dashes as underscores; of a name given twice the last counts.

    ValueError where quotes do not close. A variable that the text does not assign stays as it is.
    """
    text = COMMENT.sub("", HEREDOC.sub("", text))
    text = TRACED.sub("", text.replace("\\\n", " "))
    known = {name: value.strip("\"'") for name, value in ASSIGNED.findall(text)}
    text = ASSIGNED.sub(lambda found: "\n" + found[2].strip("\"'").replace("\n", "\f"), text)
    text = text.replace("\n", f"\n{END} ").replace("\f", "\n")  # but not of a line within quotes
    for _ in range(DEEP):
        text = VARIABLE.sub(lambda found: known.get(found[1] or found[2], found[0]), text)
    text = PRODUCT.sub(lambda found: str(math.prod(int(number) for number in found[1].split("*"))), text)
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ValueError(f"arguments: not a command line ({error})") from None
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        if word.startswith("--") and len(word) > 2:
            name, _, value = word[2:].partition("=")
            name = name.replace("-", "_")
            given[name] = [value] if value else []
        elif word == END:
            name = ""
        elif name and (not word.startswith("-") or NUMBER.match(word)):
            given[name].append(word)
        else:
            name = ""
    return given
