"""What the documentation shows works: its commands run, its links lead somewhere, its tables of
fields are complete.

A fenced block below the line `<!-- run -->` is run, one below `<!-- run: exit code 1 -->` must end
so, one below `<!-- not run: REASON -->` is not. The words of a block of text right below it must be
printed in that order; it may leave words out. The blocks of a page are typed from top to bottom in
one shell, those in Python as one program after them, in a folder with what a reader's root has. No
page writes into what ships, nor twice to one file by `>`. With TRILANE_RECORD=1 the numbers of what
is shown become those that are printed.
"""

import dataclasses
import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from difflib import SequenceMatcher
from pathlib import Path

import click
import pytest
from recorded import SWITCH
from support import REPOSITORY, known_machine

DOCS = REPOSITORY / "docs"
PAGES = sorted(
    [*REPOSITORY.glob("*.md"), REPOSITORY / "outputs" / "README.md", *DOCS.rglob("*.md")]
)
RUN = re.compile(
    r"^<!-- run(?:: exit code (\d+))? -->\n+```(bash|python)\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?",
    re.M | re.S,
)
MARKER = re.compile(r"<!-- (run(: exit code \d+)?|not run: .+) -->")
WORD = re.compile(r"\w(?:[\w.,:/%+-]*[\w%+])?")
FENCE = re.compile(r"^```.*?^```$", re.M | re.S)
BASH = re.compile(r"^```bash\n(.*?)^```$", re.M | re.S)
ABOVE = re.compile(r"(.*)\n+```bash\n(.*)")
LINK = re.compile(r"\[[^\]\n]*\]\(([^)\s]+)\)")
SECONDS = 400.0  # for one page, on a machine that does other things too
SHIPPED = ("docs", "notebooks")
# `>` does not overwrite; the last command that fails gives a block's exit code
TYPED = "set -Cuo pipefail\ntrap 'code=$?' ERR\n"
# (exit $?) calls the trap where `a && b` failed in a
READ = """(exit $?)
printf '\\0%s\\0' "$code"
printf '\\0' >&2
"""


def name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def blocks(page: Path) -> list[tuple[int, str, str]]:
    """The blocks of a page that are run, in order, each with its exit code, and what the page shows
    of its output.

    Those in Python run once, as the program that they are together, after the others.
    """
    found, program, shown = [], "", ""
    for code, language, block, text in RUN.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            program, shown = program + block, shown + text
        else:
            found.append((int(code or 0), block, text))
    return [*found, (0, f"python - <<'END'\n{program}END", shown)] if program else found


def not_printed(shown: str, *printed: str) -> list[str]:
    """The words of `shown` from the first one on that is not printed in this order; [] where all
    are.
    """
    rest, words = iter(WORD.findall(" ".join(printed))), WORD.findall(shown)
    return next((words[n:] for n, word in enumerate(words) if word not in rest), [])


def with_printed_numbers(shown: str, printed: str) -> str:
    """What a page shows, with the numbers that are printed now in place of its own."""
    old = list(WORD.finditer(shown))
    new = WORD.findall(printed)
    shapes = [
        [re.sub(r"[\d.,]+", "0", word) for word in words] for words in (WORD.findall(shown), new)
    ]
    pieces = []
    end = 0
    for block in SequenceMatcher(None, *shapes, autojunk=False).get_matching_blocks():
        for offset in range(block.size):
            place = old[block.a + offset]
            pieces += [shown[end : place.start()], new[block.b + offset]]
            end = place.end()
    return "".join([*pieces, shown[end:]])


def shell(folder: Path) -> dict[str, str]:
    """An environment in which `trilane` is this repository's command, and `folder` the root of a
    reader's clone.
    """
    for name in SHIPPED:
        shutil.copytree(REPOSITORY / name, folder / name)
    commands = folder / ".venv" / "bin"
    commands.mkdir(parents=True)
    (commands / "activate").touch()
    command = commands / "trilane"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m trilane "$@"\n', encoding="utf-8")
    command.chmod(0o755)
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    outputs = str(known_machine(folder / "outputs"))
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": str(REPOSITORY / "lib"),
        "TRILANE_OUTPUTS": outputs,
    }


def typed(lines: list[str], folder: Path) -> list[tuple[int, str, str]]:
    """Exit code, output and errors of each block, all in one shell."""
    script = TYPED + "".join(f"code=0\n{block}\n{READ}" for block in lines)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=shell(folder),
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    printed = done.stdout.split("\0")[:-1]
    codes = [int(code) for code in printed[1::2]]
    assert len(codes) == len(lines), (
        f"the shell ended\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )
    return [*zip(codes, printed[::2], done.stderr.split("\0"), strict=False)]


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=name)
def test_the_commands_of_a_page_run(page: Path, tmp_path):
    shown = blocks(page)
    printed = typed([block for _, block, _ in shown], tmp_path)
    for folder in SHIPPED:
        written = subprocess.run(
            ["diff", "-rq", REPOSITORY / folder, tmp_path / folder], capture_output=True, text=True
        )
        assert written.stdout == "", "a page writes into what ships"
    for (code, block, text), (actual, out, errors) in zip(shown, printed, strict=True):
        assert actual == code, f"{block}\n{out[-2000:]}\n{errors[-2000:]}"
        missing = min(not_printed(text, out, errors), not_printed(text, errors, out), key=len)
        if missing and os.environ.get(SWITCH):
            source = page.read_text(encoding="utf-8")
            again = with_printed_numbers(text, f"{out}\n{errors}")
            page.write_text(source.replace(text, again), encoding="utf-8")
            continue
        assert not missing, (
            f"{SWITCH}=1 records it again\n{block}\nshown, not printed: {' '.join(missing[:12])}\n{out}\n{errors}"
        )


def test_each_block_of_the_tutorial_and_the_guides_is_typed_or_gives_the_reason():
    pages = [REPOSITORY / "README.md", DOCS / "tutorial.md", *(DOCS / "guides").glob("*.md")]
    assert not [
        (name(page), first)
        for page in pages
        for above, first in ABOVE.findall(page.read_text(encoding="utf-8"))
        if not MARKER.fullmatch(above)
    ]


def commands(page: Path) -> list[list[str]]:
    """The words of each `trilane ...` on a page, in blocks of bash and in inline code."""
    text = page.read_text(encoding="utf-8")
    lines = "\n".join(BASH.findall(text)).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`(trilane [^`]+)`", FENCE.sub("", text))
    found = re.findall(
        r"(?:^|&& |exec )\s*(?:srun .* )?(?:python -m )?trilane ([^|;&<>\n]+)",
        "\n".join(lines),
        re.M,
    )
    return [shlex.split(line, comments=True) for line in found]


def mistake(words: list[str]) -> str:
    """The first word that names no command or option; empty where all do."""
    from trilane.cli.app import root

    command, rest, context = root, list(words), click.Context(root)
    options = {"--help", "--version"}
    while isinstance(command, click.Group):
        if not rest or not re.fullmatch(r"[a-z-]+", rest[0]) or rest[0].startswith("-"):
            return next(
                (w for w in rest if w.startswith("-") and w not in options), ""
            )  # `trilane --help`
        word = rest.pop(0)
        command = command.get_command(context, word)
        if command is None:
            return word
    options |= {
        name
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    return next(
        (
            word
            for word in rest
            if re.match(r"--?[a-z]", word) and word.partition("=")[0] not in options
        ),
        "",
    )


def test_commands_and_options_exist():
    pages = [page for page in PAGES if page.name not in ("log.md", "CHANGELOG.md")]
    assert not {
        (name(page), " ".join(words))
        for page in pages
        for words in commands(page)
        if mistake(words)
    }


def links(page: Path) -> set[Path]:
    """The files and folders that a page links to."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = {
        link.partition("#")[0] for link in LINK.findall(text) if not re.match(r"\w+:|#", link)
    }
    return {Path(os.path.normpath(page.parent / target)) for target in targets}


def test_links_lead_somewhere():
    assert not [
        (name(page), str(target)) for page in PAGES for target in links(page) if not target.exists()
    ]


def documented() -> list[tuple[str, set[str]]]:
    """Each dataclass that has a section in docs/reference/, with the names in the first column of
    its table.
    """
    found = []
    for page in sorted((DOCS / "reference").glob("*.md")):
        for section in re.split(r"^#+ ", page.read_text(encoding="utf-8"), flags=re.M):
            if title := re.match(r"`(trilane\.[\w.]+)`\n", section):
                found.append((title[1], set(re.findall(r"^\| `(\w+)`", section, re.M))))
    return found


def test_every_field_has_a_line():
    assert len(documented()) > 10
    for path, names in documented():
        module, _, cls = path.rpartition(".")
        assert names == {
            f.name for f in dataclasses.fields(getattr(importlib.import_module(module), cls))
        }, path
