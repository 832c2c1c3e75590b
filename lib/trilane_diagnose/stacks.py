"""What a process does, from the dump of any tool: py-spy, faulthandler, Python's trace module."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trilane.utils.files import natural
from trilane.utils.tables import Record, grouped
from trilane.utils.validation import require, require_folder, shipped_json

# What readers of damaged JSON or pickles raise.
DAMAGED = (
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    EOFError,
)


@cache
def patterns(table: str) -> dict[str, re.Pattern[str]]:
    """A table of data/hang_patterns.json by its keys."""
    return {
        key: re.compile("|".join(parts), re.I)
        for key, parts in shipped_json("hang_patterns")[table].items()
    }


class Frame(NamedTuple):
    """A stack frame: the function without its class, the end of the file's path, the line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies the frame across tools, which report one file relative to different folders."""
        return self.function, self.file.rpartition("/")[2], self.line


Frames = tuple[Frame, ...]  # a stack, innermost frame first


def frame(function: str, file: str, line: str | int) -> Frame:
    """The Frame of a function, which may be qualified by its class; of long names the end."""
    # Tools shorten paths differently: the last three parts below site-packages are common to all.
    inside = file[-400:].replace("\\", "/").rpartition("site-packages/")[2]
    name, number = function[-400:], int(line) if str(line).isdecimal() else 0
    return Frame(name.rpartition(".")[2] or name, "/".join(inside.split("/")[-3:]), number)


class Thread(NamedTuple):
    """One thread: its frames, and whether it held Python's GIL, or wrote the dump itself."""

    frames: Frames
    name: str = ""
    owns_gil: bool = False
    is_current: bool = False


@dataclass(frozen=True, kw_only=True)
class Dump:
    """One process: the stack of its training thread, and the helper thread that holds Python's GIL
    meanwhile.
    """

    frames: Frames = ()
    owns_gil: bool = False
    holder: str = ""
    pid: int = 0
    command: str = ""
    error: str = ""  # why there is no stack


def _dump(threads: list[Thread], **facts: Any) -> Dump:
    helpers = [
        t
        for t in threads
        if t.frames and t.frames[-1].function in ("_bootstrap", "_bootstrap_inner")
    ]
    started = [t for t in threads if t.frames and t not in helpers]
    # faulthandler names no thread, and cuts a deep stack after a hundred frames, so that its root
    # is missing
    main = [t for t in started if t.name == "MainThread"]
    roots = ("<module>", "_run_module_as_main", "_start", "main")
    main = main or [t for t in started if t.frames[-1].function in roots]
    main = main or list(filter(_waits_for_engine, started)) or [t for t in started if t.is_current]
    frames, owns_gil = (main[0].frames, main[0].owns_gil) if main else ((), False)
    # With CUDA the backward pass runs in a thread that Python did not start. It holds only the
    # frames of what C++ called (a function's backward, a hook of a parameter), which belong on top.
    others = [t for t in started if t != main[0]] if main and _waits_for_engine(main[0]) else []
    for top in sorted(others, key=_waits_for_engine)[:1]:
        frames, owns_gil = top.frames + frames, top.owns_gil
    holders = [
        f"{t.name} holds Python's global lock in {t.frames[0]}" for t in helpers if t.owns_gil
    ]
    return Dump(frames=frames, owns_gil=owns_gil, holder="".join(holders[:1]), **facts)


def _waits_for_engine(thread: Thread) -> bool:
    # autograd's: torch/autograd/graph.py, __init__.py; megatron/core/pipeline_parallel/schedules.py
    at = str(thread.frames[0])
    return bool(
        re.match(r"(?:(?:_engine_run_|run_)?backward|grad) \(.*autograd|custom_backward ", at)
    )


def _python(frames: list[Frame]) -> Frames:
    """The frames without those of C and C++ (--native), which are alike for most waits; all where
    none is Python's.
    """
    kept = [f for f in frames if f.line > 0 and not patterns("files")["native"].search(f.file)]
    return tuple(kept or frames)


def read_pyspy(text: str) -> list[Dump]:
    """The processes in the text of `py-spy dump`s on one host, in order; of a process that is there
    twice the last.
    """
    found: dict[str, Dump] = {}
    # Where no line names the processes, each main thread begins one.
    begin = r"Process \d" if re.search(r"(?m)^Process \d", text) else r'Thread .*"MainThread"'
    for block in re.split(f"(?m)^(?={begin})", text):
        head, *threads = re.split(r"(?m)^(?=Thread (?:0x)?[0-9a-fA-F]+ \()", block)
        process = re.match(r"Process (\d{1,9}): (.*)", head)
        error = re.search(r"(?m)^(?:Error|Failed to [\w ]+): ?.*", head)
        pid, command = process.groups() if process else ("0", "")
        facts = {
            "pid": int(pid),
            "command": command.strip(),
            "error": error[0].strip() if error else "",
        }
        key = pid if process else block[:40]
        if threads or (key not in found and (process or error)):
            found[key] = _dump([*map(_thread, threads)], **facts)
    return list(found.values())


def _thread(text: str) -> Thread:
    match = re.match(r'Thread \S+ \(([\w+ ]*)\)?(?:: "(.*)")?', text)
    state, name = match.groups() if match else ("", "")
    # Lines that are indented deeper are values of variables (--locals), which may look like frames.
    lines = re.findall(r"(?m)^ {4}(\S.*) \(([^()\n]*?)(?::(\d{1,9}))?\)[ \r]*$", text)
    return Thread(_python([frame(*line) for line in lines]), name or "", "gil" in state)


def read_json(text: str) -> list[Dump]:
    """The process in the output of `py-spy dump --json`; none where it is damaged, or another text."""
    threads = list[Thread]()
    try:
        for t in (found := json.loads(text)):
            frames = [frame(f["name"], f["filename"], f["line"]) for f in t["frames"]]
            threads.append(Thread(_python(frames), t["thread_name"] or "", bool(t["owns_gil"])))
        return [_dump(threads, pid=int(found[0]["pid"]))]
    except DAMAGED:
        return []


def read_faults(text: str) -> Dump:
    """The last dump in the text of faulthandler, which appends one at every signal, or each time a
    timer ends.
    """
    threads: dict[str, tuple[bool, list[Frame]]] = {}
    for line in text.splitlines():
        if match := re.match(
            r"(Current thread|Thread) (0x[0-9a-fA-F]+).{0,80}\(most recent call first\)", line
        ):
            # One dump holds each thread once.
            threads = {} if match[2] in threads else threads
            threads[match[2]] = match[1] == "Current thread", []
        elif line.startswith("Timeout ("):  # a timer's dump, which has no current thread
            threads = {}
        elif threads and (
            match := re.match(r'\s*File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$', line)
        ):
            [*threads.values()][-1][1].append(frame(match[3], match[1], match[2]))
    return _dump(
        [Thread(tuple(frames), is_current=current) for current, frames in threads.values()]
    )


@dataclass(frozen=True, kw_only=True)
class LastCalls(Record):
    """The places where the traces of ranks end, the rarest first, which are the suspects: the
    function entered last, the last line run, and the ranks.
    """

    groups: tuple[dict[str, Any], ...]

    def to_text(self) -> str:
        """A line for each place."""
        return "\n".join(
            "{function}  {line}: {}".format(", ".join(g["ranks"][:12]), **g) for g in self.groups
        )


def last_calls(folder: Path) -> LastCalls:
    """The last call of every trace by Python's `trace` module below `folder`; ValueError where
    there is none.
    """
    require_folder("folder", folder)
    places = grouped(
        sorted(filter(Path.is_file, folder.rglob("*")), key=lambda p: natural(p.name)), _last_call
    )
    groups = []
    for (function, line), paths in places.items():
        ranks = [(re.search(r"rank[_-]?(\d+)", path.name) or [path.stem] * 2)[1] for path in paths]
        groups += [{"function": function, "line": line, "ranks": ranks}] if line else []
    require(bool(groups), "folder", folder, "holds no trace of Python's trace module")
    return LastCalls(
        groups=tuple(sorted(groups, key=lambda group: (len(group["ranks"]), group["function"])))
    )


def _last_call(path: Path) -> tuple[str, str]:
    """The function entered last, and the last line run, "" where the file is no trace."""
    with path.open("rb") as file:
        # A trace may have gigabytes. Its last MB has some 40,000 lines: a loop may run them and
        # call nothing.
        file.seek(max(0, path.stat().st_size - (1 << 20)))
        tail = file.read(1 << 20).decode("utf-8", "replace")
    entered = re.findall(r"(?m)^ --- modulename: (.+?), funcname: (.+)$", tail)[-1:]
    ran = re.findall(r"(?m)^([\w.<>/-]+\.py|<[\w ]+>)\((\d+)\): ?(.*)$", tail)[-1:]
    function = "".join(f"{name.strip()} ({module})" for module, name in entered)
    return function, "".join(f"{file}:{number}  {code.strip()[:120]}" for file, number, code in ran)
