"""The arguments of Megatron: of a command line, of the block that it prints into its log, and of
what a script launches, where bash runs it with stubs in place of the launchers.
"""

import re
import shlex
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from trilane.interop.megatron_args import Arguments, known_arguments
from trilane.utils.validation import DATA, read_text, require

MOST_BYTES = 1 << 17  # of a command line, as of an argument in Linux (MAX_ARG_STRLEN)
MOST_LOG_BYTES = 1 << 26
OPTION = re.compile(r"--([^\s=]+)=?(.*)", re.S)
HEAD = "-- arguments --"  # of _print_args() in its arguments.py, as the end below
END = "-- end of arguments --"
RULE = "a script is not read, but what it launches: trilane convert megatron --stubs DIR, run it "
RULE += "with PATH=DIR:$PATH, and --read DIR"


def write_stubs(folder: Path) -> None:
    """Write an executable stub for each launcher into a new or empty folder:
    write_stubs(Path("stubs")).

    Each call of a stub writes its name and arguments, ended by NUL, to a new file launch-N of the
    folder, and exits with 0. Raises ValueError for a folder that is not empty.
    """
    folder.mkdir(parents=True, exist_ok=True)
    require(not any(folder.iterdir()), "stubs", folder, "has files; name a new or an empty folder")
    for name in known_arguments()["launchers"]:
        stub = folder / name
        shutil.copy(DATA / "stub.sh", stub)
        stub.chmod(0o755)


def read_launches(path: Path) -> dict[str, Arguments]:
    """The arguments of each launch by its name: of a file, or of the calls that stubs have written
    to a folder.

    A call without --num-layers, such as `python3 -c ...`, is no launch. Raises ValueError where
    there is none.
    """
    if not path.is_dir():
        return {path.stem: read_arguments(read_text(path, "read", MOST_LOG_BYTES, "replace"))}
    launches = {}
    calls = sorted(path.glob("launch-*"))
    for call in calls:
        text = read_text(call, "read", MOST_BYTES, "replace")
        if "--num-layers" in text:
            launches[call.name] = read_words(text.split("\0"))
    rule = f"of {len(calls)} calls of its stubs none has --num-layers, as a launch of Megatron has"
    require(bool(launches), "read", path, rule)
    return launches


def read_arguments(text: str) -> Arguments:
    """Each `--name` with its values, dashes as underscores; the last of a repeated name counts.

        read_arguments("torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24")

    The first line may begin with a command, and lines may be continued; of a log, its block of
    arguments is read. Raises ValueError for a script, a variable, and unclosed quotes.
    """
    if HEAD in text:
        return _of_block(text)
    require(len(text) <= MOST_BYTES, "arguments", len(text), f"at most {MOST_BYTES} bytes are read")
    text = text.replace("\\\n", " ").strip()
    launchers = [name for name in known_arguments()["launchers"] if name in text]
    rule = f"of a script that names {', '.join(launchers) or 'no launcher'}: {RULE}"
    for line in text.split("\n")[1:]:
        require(not line or line.lstrip().startswith("--"), "arguments", line, rule)
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ValueError(f"arguments=unreadable: not a command line ({error})") from None
    return read_words(words)


def read_words(words: Sequence[str]) -> Arguments:
    """Each `--name` of a command's words with its values, as read_arguments() has them.

    A word that holds a command itself (`bash -c "torchrun ..."`) is read, from its first line with
    an option on. A pipe or redirection ends the values. Raises ValueError for a variable, but for
    one whose value changes nothing in a plan.
    """
    known = known_arguments()
    given: Arguments = {}
    name = ""
    for word in words:
        if option := OPTION.fullmatch(word):
            name = option[1].replace("-", "_")
            name = known["renamed"].get(name, name)
            given[name] = []
            word = option[2]
        if not word:
            continue
        if " --" in word:
            given |= read_arguments(re.sub(r"\A(?:(?!.* --).*\n)*", "", word))
        elif re.search(r"\$|^[();<&]+$", word):
            require(name in known["variable"] and not given[name], "arguments", word, RULE)
            name = ""
        elif not name or re.match(r"-(?![\d.])|\d?>|&>|\|$", word):
            name = ""
        elif given[name] and re.fullmatch(r"[\w./-]+\.py", word):
            # the launcher's arguments end: torchrun --nproc_per_node 8 pretrain_gpt.py
            name = ""
        else:
            given[name].append(word)
    require(bool(given), "arguments", " ".join(words), "holds no --name")
    return given


def _of_block(text: str) -> Arguments:
    """The arguments of a log's block; the padded vocabulary is of a later line."""
    blocks = text.split(HEAD)[1:]
    is_whole = len(blocks) == 1 and END in text
    require(is_whole, "arguments", f"{len(blocks)} blocks", "must be one, with head and end")
    block, _, later = blocks[0].partition(END)
    given = printed_arguments(re.findall(r"  (\w+) \.+ (.*\S)", block))
    if size := re.search(r"padded vocab .*\(new size: (\d+)\)", later):
        given["padded_vocab_size"] = [size[1]]
    return given


def printed_arguments(pairs: Iterable[tuple[str, object]]) -> Arguments:
    """The arguments of names and values that a program prints, every default among them: what is
    off (None, False, empty) is left out. Raises ValueError for a list with open quotes.
    """
    known = known_arguments()
    given: Arguments = {}
    for name, printed in pairs:
        value = str(printed)
        name = known["renamed"].get(name, name)
        switch = known["switched_off"].get(name)
        if switch and value == "False":
            given[switch] = []
        elif value == "True":
            given[name] = []
        elif value.startswith("["):
            given[name] = shlex.split(value.strip("[]").replace(",", " "))
        elif value not in ("None", "False"):
            value = value.removeprefix("PositionEmbeddingType.").replace("torch.float", "fp")
            given[name] = [value]
    return given
