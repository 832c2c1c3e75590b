"""Directives: the #SBATCH lines of a script, edited by hand or not, as sbatch reads them."""

import re
import shlex

# sbatch's one-letter options that take a value
SHORT = {
    **{"A": "account", "C": "constraint", "J": "job-name", "N": "nodes", "n": "ntasks", "p": "partition", "q": "qos"},
    **{"t": "time", "w": "nodelist", "x": "exclude", "o": "output", "e": "error", "a": "array", "c": "cpus-per-task"},
    **{"d": "dependency", "G": "gpus", "D": "chdir", "b": "begin", "L": "licenses", "M": "clusters"},
}


def directives(script: str) -> dict[str, str]:
    """The options by their long names, "" for one without a value; the last one counts where one comes twice.

    sbatch reads as far as the first line that is no comment. ValueError for a quote that is not closed. Left out: long
    names cut short, which sbatch takes where only one option begins so.
    """
    found: dict[str, str] = {}
    for line in _before_commands(script):
        words = _words(line)
        while words:
            name, value = _option(words.pop(0))
            if name and value is None:
                # `--time 20:00:00`: a word after an option is its value, since no other word may stand there
                value = words.pop(0) if words and not words[0].startswith("-") else ""
            if name:
                found[name] = value or ""
    return found


def gpus(gres: str) -> int:
    """The GPUs of a --gres value: 8 of "gpu:8", "gpu:a100:8" or "gpu:a100:8,nvme:1", 1 of "gpu"."""
    parts = [part for part in gres.split(",") if part.split(":")[0] == "gpu"]
    counts = [re.search(r":(\d+)$", part) for part in parts]
    return sum(int(count[1]) if count else 1 for count in counts)


def _before_commands(script: str) -> list[str]:
    lines = []
    for line in script.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            break
        if re.match(r"#SBATCH\s", line):
            lines.append(line.removeprefix("#SBATCH"))
    return lines


def _words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        raise ValueError(f"script=#SBATCH{line}: cannot be read: {error}") from None


def _option(word: str) -> tuple[str, str | None]:
    """Name and value of an option, None for a value that may stand in the next word; "" for what is no option."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        return name, value if equals else None
    if re.match(r"-[A-Za-z]", word):
        return SHORT.get(word[1], word[1]), word[2:] or None
    return "", None
