"""The arguments of one command line, or a list of arguments; a script is refused."""

import re
import shlex

from trilane.utils.validation import require

MOST_BYTES = 1 << 17  # of a text, as of an argument in Linux (MAX_ARG_STRLEN)
OPTION = re.compile(r"--([^\s=]+)(=|)(.*)", re.S)


def read_arguments(text: str) -> dict[str, list[str]]:
    """Each `--name` with its values, dashes as underscores; the last of a repeated name counts.

    The first line may begin with a command, and lines may be continued. Raises ValueError for a
    script, and for unclosed quotes.
    """
    text = text.replace("\\\n", " ").strip()
    rule = "a script is not read, but the command line that it runs, its variables replaced"
    for line in text.split("\n")[1:]:
        require(not line or line.lstrip().startswith("--"), "arguments", line, rule)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"arguments=unreadable: not a command line ({error})") from None
    given: dict[str, list[str]] = {}
    name = ""
    for word in words:
        is_word = "$" not in word and not re.fullmatch("[();<>|&]+", word)
        require(is_word, "arguments", word, rule)
        option = OPTION.fullmatch(word)
        if option:
            name = option[1].replace("-", "_")
            given[name] = [option[3]] if option[2] else []
        elif not name or re.match(r"-(?![\d.])", word):
            name = ""
        elif given[name] and re.fullmatch(r"[\w./-]+\.py", word):
            # the launcher's arguments end: torchrun --nproc_per_node 8 pretrain_gpt.py
            name = ""
        else:
            given[name].append(word)
    require(bool(given), "arguments", text.partition("\n")[0], "holds no --name")
    return given
