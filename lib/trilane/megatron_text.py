"""A command line, or a piece of a script, as arguments: continued lines, quotes, comments and plain variables."""

import re
import shlex

ASSIGNED = re.compile(r"""(?:^|;)\s*(?:export\s+)?([A-Za-z_]\w*)=("(?:[^"\\]|\\.)*"|'[^']*'|[^\s;&|]*)""", re.M | re.S)
VARIABLE = re.compile(r"\$(?:\{([A-Za-z_]\w*)\}|([A-Za-z_]\w*))")
TRACED = re.compile(r"^\++ ", re.M)  # what bash -x puts before a command
NUMBER = re.compile(r"-[\d.]")
DEEP = 10  # variables within variables


def read_arguments(text: str) -> dict[str, list[str]]:
    """Each `--name` with its values, dashes as underscores; of a name given twice the last counts.

    ValueError where quotes do not close. A variable that the text does not assign stays as it is.
    """
    text = TRACED.sub("", text.replace("\\\n", " "))
    known = {name: value.strip("\"'") for name, value in ASSIGNED.findall(text)}
    text = ASSIGNED.sub(lambda found: "\n" + found[2].strip("\"'"), text)
    for _ in range(DEEP):
        text = VARIABLE.sub(lambda found: known.get(found[1] or found[2], found[0]), text)
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
        elif name and (not word.startswith("-") or NUMBER.match(word)):
            given[name].append(word)
        else:
            name = ""
    return given
