"""What a process does, from the dump of any tool: py-spy, faulthandler, Python's trace module."""

import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from trilane.utils.files import natural
from trilane.utils.frozen import frozen
from trilane.utils.tables import Json, Record, grouped
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
LONGEST_NAME = 400  # of a function or a file: the end is kept
# functions at the root of a stack
STARTS_THREAD = ("_bootstrap", "_bootstrap_inner")
STARTS_PROGRAM = ("<module>", "_run_module_as_main", "_start", "main")
# autograd's: torch/autograd/graph.py, __init__.py; megatron/core/pipeline_parallel/schedules.py
ENGINE = re.compile(r"(?:(?:_engine_run_|run_)?backward|grad) \(.*autograd|custom_backward ")
# Of a trace, which may have gigabytes: some 40,000 lines. A loop may run them and call nothing.
TAIL = 1 << 20
# the last line before a dump in a file of many: [rank6], ===== rank 6 =====, rank 6:
RANK = re.compile(r"(?i)(?:^|\n)[=\-#\s\[]*rank[ _]?(\d{1,7})[=\-#\s\]:]*$")


@cache
def patterns(table: str) -> dict[str, re.Pattern[str]]:
    """A table of data/hang_patterns.json by its keys."""
    lists = shipped_json("hang_patterns")[table]
    return {key: re.compile("|".join(parts), re.I) for key, parts in lists.items()}


class Frame(NamedTuple):
    """A stack frame: the function without its class, the end of the file's path, the line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def key(self) -> tuple[str, str, int]:
        """Identifies the frame across tools, which report a file relative to other folders."""
        return self.function, self.file.rpartition("/")[2], self.line


Frames = tuple[Frame, ...]  # a stack, innermost frame first


def frame(function: str, file: str, line: str | int) -> Frame:
    """The Frame of a function, which may be qualified by its class; of long names the end."""
    name = function[-LONGEST_NAME:]
    path = file[-LONGEST_NAME:].rpartition("site-packages/")[2]
    # Tools shorten paths differently: the last three parts below site-packages are common to all.
    end = "/".join(path.split("/")[-3:])
    return Frame(name.rpartition(".")[2] or name, end, int(line) if str(line).isdecimal() else 0)


class Thread(NamedTuple):
    """One thread: its frames, and whether it held Python's GIL, or wrote the dump itself."""

    frames: Frames
    name: str = ""
    owns_gil: bool = False
    is_current: bool = False


@frozen
class Dump:
    """One process: the stack of its training thread, and whether that held Python's GIL."""

    frames: Frames = ()
    owns_gil: bool = False
    pid: int = 0
    rank: int | None = None  # by the line before it
    command: str = ""
    error: str = ""  # why there is no stack


def _dump(threads: Sequence[Thread], **facts: Any) -> Dump:
    stacks = [thread for thread in threads if thread.frames]
    started = [t for t in stacks if t.frames[-1].function not in STARTS_THREAD]
    main = _main_thread(started)
    if main is None:
        return Dump(**facts)
    frames = main.frames
    owns_gil = main.owns_gil
    if _waits_for_engine(main):
        # With CUDA the backward pass runs in a thread that Python did not start. It holds only the
        # frames of what C++ called (a function's backward, a hook of a parameter), which belong on
        # top.
        others = sorted((t for t in started if t != main), key=_waits_for_engine)
        if others:
            frames = others[0].frames + frames
            owns_gil = others[0].owns_gil
    return Dump(frames=frames, owns_gil=owns_gil, **facts)


def _main_thread(started: Sequence[Thread]) -> Thread | None:
    """The main one of the threads that Python's threading did not start."""
    # faulthandler names no thread, and cuts a deep stack after a hundred frames, so that its root
    # is missing
    for is_main in (
        lambda thread: thread.name == "MainThread",
        lambda thread: thread.frames[-1].function in STARTS_PROGRAM,
        _waits_for_engine,
        lambda thread: thread.is_current,
    ):
        for thread in filter(is_main, started):
            return thread
    return None


def _waits_for_engine(thread: Thread) -> bool:
    return bool(ENGINE.match(str(thread.frames[0])))


def _python(frames: list[Frame]) -> Frames:
    """The frames without those of C and C++ (--native), which are alike for most waits; all where
    none is Python's.
    """
    native = patterns("files")["native"]
    kept = [frame for frame in frames if frame.line > 0 and not native.search(frame.file)]
    return tuple(kept or frames)


def read_pyspy(text: str) -> list[Dump]:
    """The processes in the text of `py-spy dump`s on one host, in order; of a process that is there
    twice the last.
    """
    dumps = {}
    # Where no line names the processes, each main thread begins one.
    if re.search(r"(?m)^Process \d", text):
        begin = r"Process \d"
    else:
        begin = r'Thread .*"MainThread"'
    before = ""
    for block in re.split(f"(?m)^(?={begin})", text):
        named = RANK.search(before[-200:])
        before = block
        head, *threads = re.split(r"(?m)^(?=Thread (?:0x)?[0-9a-fA-F]+ \()", block)
        process = re.match(r"Process (\d{1,9}): (.*)", head)
        error = re.search(r"(?m)^(?:Error|Failed to [\w ]+): ?.*", head)
        facts: dict[str, Any] = {"error": error[0].strip() if error else ""}
        key = block[:40]
        if named:
            facts["rank"] = int(named[1])
        if process:
            key = process[1]
            facts |= {"pid": int(process[1]), "command": process[2].strip()}
        if threads or (key not in dumps and (process or error)):
            dumps[key] = _dump([*map(_thread, threads)], **facts)
    return list(dumps.values())


def _thread(text: str) -> Thread:
    match = re.match(r'Thread \S+ \(([\w+ ]*)\)?(?:: "(.*)")?', text)
    assert match  # by the split
    # Lines that are indented deeper are values of variables (--locals), which may look like frames.
    lines = re.findall(r"(?m)^ {4}(\S.*) \(([^()\n]*?)(?::(\d{1,9}))?\)[ \r]*$", text)
    return Thread(_python([frame(*line) for line in lines]), match[2] or "", "gil" in match[1])


def read_faults(text: str) -> Dump:
    """The last dump in the text of faulthandler, which appends one at every signal, or each time a
    timer ends.
    """
    heading = re.compile(
        r"(Current thread|Thread) (0x[0-9a-fA-F]+).{0,80}\(most recent call first\)"
    )
    frames_of: dict[str, list[Frame]] = {}
    current = ""
    thread = ""
    for line in text.splitlines():
        begins = heading.match(line)
        if begins:
            thread = begins[2]
            if thread in frames_of:  # One dump holds each thread once.
                frames_of = {}
                current = ""
            frames_of[thread] = []
            if begins[1] == "Current thread":
                current = thread
        elif frames_of:
            match = re.match(r'\s*File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$', line)
            if match:
                frames_of[thread].append(frame(match[3], match[1], match[2]))
    return _dump([Thread(tuple(f), is_current=n == current) for n, f in frames_of.items()])


@frozen
class LastCalls(Record):
    """The places where the traces of ranks end, the rarest first, which are the suspects: the
    function entered last, the last line run, and the files.
    """

    groups: tuple[Json, ...]

    def summary(self) -> str:
        """A line for each place."""
        lines = []
        for group in self.groups:
            ranks = ", ".join(group["ranks"][:12])
            lines.append(f"{group['function']}  {group['line']}: {ranks}")
        return "\n".join(lines)


def last_calls(folder: Path) -> LastCalls:
    """The last call of every trace by Python's `trace` module below `folder`; ValueError where
    there is none.
    """
    require_folder("folder", folder)
    paths = sorted(filter(Path.is_file, folder.rglob("*")), key=lambda path: natural(path.name))
    groups = []
    for (function, line), traces in grouped(paths, _last_call).items():
        if line:
            names = [path.stem for path in traces]
            groups.append({"function": function, "line": line, "ranks": names})
    require(groups, "folder", folder, "holds no trace of Python's trace module")
    groups.sort(key=lambda group: (len(group["ranks"]), group["function"]))
    return LastCalls(groups=tuple(groups))


def _last_call(path: Path) -> tuple[str, str]:
    """The function entered last, and the last line run, "" where the file is no trace."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL))
        tail = file.read(TAIL).decode("utf-8", "replace")
    function = line = ""
    for module, name in re.findall(r"(?m)^ --- modulename: (.+?), funcname: (.+)$", tail)[-1:]:
        function = f"{name.strip()} ({module})"
    pattern = r"(?m)^([\w.<>/-]+\.py|<[\w ]+>)\((\d+)\): ?(.*)$"
    for file_name, number, code in re.findall(pattern, tail)[-1:]:
        line = f"{file_name}:{number}  {code.strip()[:120]}"
    return function, line
