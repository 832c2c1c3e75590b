"""What a process does, from the dump of any tool: py-spy, faulthandler, a traceback in a log, Python's trace module."""

import json
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from trilane.utils.files import natural
from trilane.utils.tables import Record, grouped
from trilane.utils.validation import require, require_folder, shipped_json

# What readers of damaged JSON or pickles raise.
DAMAGED = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError, EOFError)


@cache
def patterns(table: str) -> dict[str, re.Pattern[str]]:
    """A table of data/hang_patterns.json by its keys."""
    return {key: re.compile("|".join(parts), re.I) for key, parts in shipped_json("hang_patterns")[table].items()}


@dataclass(frozen=True, order=True)
class Frame:
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


def frame(function: str, file: str, line: int, most: int = 400) -> Frame:
    """The Frame of a function, which may be qualified by its class; of longer names the last `most` characters."""
    # Tools shorten paths differently: the last three parts below site-packages are common to all.
    inside = file[-most:].replace("\\", "/").rpartition("site-packages/")[2]
    name = function[-most:]
    return Frame(name.rpartition(".")[2] or name, "/".join(inside.split("/")[-3:]), line)


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread: its frames, its number, and whether it held Python's GIL, or wrote the dump itself."""

    frames: Frames
    name: str = ""
    number: str = ""
    owns_gil: bool = False
    is_current: bool = False

    @property
    def outermost(self) -> str:
        """The function that the thread began with; "" without frames."""
        return self.frames[-1].function if self.frames else ""

    @property
    def is_helper(self) -> bool:
        """Whether Python's threading started it."""
        return self.outermost in ("_bootstrap", "_bootstrap_inner")

    @property
    def waits_for_engine(self) -> bool:
        """Whether it waits for autograd's engine."""
        at = str(self.frames[0]) if self.frames else ""
        # torch/autograd/graph.py and __init__.py; megatron/core/pipeline_parallel/schedules.py
        return bool(re.match(r"(?:(?:_engine_run_|run_)?backward|grad) \(.*autograd|custom_backward ", at))


@dataclass(frozen=True, kw_only=True)
class Dump:
    """The stacks of one process. `pid` is 0 and `command` "" where unknown; `cut`: the text is truncated."""

    threads: tuple[Thread, ...]
    pid: int = 0
    command: str = ""
    error: str = ""
    cut: bool = False

    @cached_property
    def main(self) -> Thread:
        """The training thread, with autograd's frames on top where it waits for its backward pass; without frames
        where a truncated dump does not show which it is."""
        started = [t for t in self.threads if t.frames and not t.is_helper]
        # faulthandler names no thread, and cuts a deep stack after a hundred frames, so that its root is missing
        named = [t for t in started if t.name == "MainThread"]
        rooted = [t for t in started if t.outermost in ("<module>", "_run_module_as_main", "_start", "main")]
        calling = [t for t in started if t.waits_for_engine]
        last = [] if self.cut else started[-1:]
        sure = named or rooted or calling or [t for t in started if t.is_current] or last
        main = sure[0] if sure else Thread(frames=())
        if not main.waits_for_engine:
            return main
        # With CUDA the backward pass, and so the collectives in it, runs in a thread that Python did not start. It
        # holds only the frames of what C++ called: a function's backward, or a hook of a parameter.
        others = [t for t in started if t is not main]
        backward = patterns("files")["backward"]
        inside = [t for t in others if any(backward.search(str(f)) for f in t.frames)] or others
        top = min(inside, key=lambda t: t.waits_for_engine, default=Thread(frames=()))
        return Thread(frames=top.frames + main.frames, name=main.name, owns_gil=top.owns_gil)

    @property
    def gil_holder(self) -> Thread | None:
        """The helper thread that holds the GIL while the training thread waits for it; None where there is none."""
        others = [t for t in self.threads if t.owns_gil and t.is_helper and t.frames != self.main.frames]
        return next((t for t in others if t.name != self.main.name), None)


def read_pyspy(text: str) -> list[Dump]:
    """The processes in the text of `py-spy dump`s on one host, in order; of a process that is there twice the last.

    A process whose stacks py-spy could not get has no threads, and an `error`.
    """
    before, *rest = re.split(r"(?m)^Process (\d{1,9}): (.*)$", text)
    # Where no line names the processes, each main thread begins one.
    bodies = [(0, "", part) for part in re.split(r'(?m)^(?=Thread .*"MainThread")', before)]
    bodies += [(int(pid), command, part) for pid, command, part in zip(rest[::3], rest[1::3], rest[2::3], strict=True)]
    found: dict[object, Dump] = {}
    for pid, command, body in bodies:
        _, *parts = re.split(r"(?m)^(?=Thread (?:0x)?[0-9a-fA-F]+ \()", body)
        error = re.search(r"(?m)^(?:Error|Failed to [\w ]+): ?.*", body)
        dump = Dump(
            threads=tuple(map(_thread_of_text, parts)),
            pid=pid,
            command=command.strip(),
            error=error[0].strip() if error else "",
            # py-spy's text ends with a whole line
            cut=body is bodies[-1][2] and not text.endswith("\n") and not _frame(text.rpartition("\n")[2]),
        )
        key = pid or dump.main.number
        if dump.threads or (key not in found and (pid or error)):
            found[key] = dump
    return list(found.values())


def _thread_of_text(text: str) -> Thread:
    head, *lines = text.splitlines()
    match = re.match(r'Thread (\S+) \(([\w+ ]*)\)?(?:: "(.*)")?', head)
    number, state, name = match.groups() if match else ("", "", "")
    found = [(len(line) - len(line.lstrip()), frame) for line in lines if (frame := _frame(line))]
    # lines that are indented deeper are values of variables (--locals), which may look like frames
    frames = [frame for indent, frame in found if indent <= found[0][0]]
    return Thread(name=name or "", number=number, owns_gil="gil" in state, frames=_python(frames))


def _frame(line: str) -> Frame | None:
    """The frame of a line `    forward (model.py:12)`; None for other lines."""
    head, _, place = line.rstrip().rpartition(" (")
    if not (head[:1].isspace() and place.endswith(")") and len(place) > 1):
        return None
    file, _, number = place[:-1].rpartition(":")
    known = number.isdecimal() and len(number) < 10
    return frame(head.strip(), file if known else place[:-1], int(number) if known else 0)


def _python(frames: list[Frame]) -> Frames:
    """The frames without those of C and C++ (--native), which are alike for most waits; all where none is Python's."""
    kept = [f.line > 0 and not patterns("files")["native"].search(f.file) for f in frames]
    first = kept.index(True) if any(kept) else len(frames)
    # that a thread waits for its GPU is seen among these alone
    gpu = [f for f in frames[:first] if patterns("functions")["native_waits"].search(f.function)]
    return (*gpu[:1], *(f for f, keep in zip(frames, kept, strict=True) if keep)) if any(kept) else tuple(frames)


def read_json(text: str) -> Dump:
    """The process in the output of `py-spy dump --json`; without threads where it is truncated."""
    try:
        threads = json.loads(text)
        return Dump(threads=tuple(map(_thread_of_json, threads)), pid=int(threads[0]["pid"]) if threads else 0)
    except DAMAGED:
        return Dump(threads=(), cut=True)


def _thread_of_json(values: dict[str, Any]) -> Thread:
    # The full path where there is one: frame() shortens the paths of all tools alike.
    frames = [frame(f["name"], f.get("filename") or f["short_filename"], int(f["line"])) for f in values["frames"]]
    return Thread(frames=_python(frames), name=values.get("thread_name") or "", owns_gil=bool(values.get("owns_gil")))


def read_faults(text: str) -> Dump:
    """The last dump in the text of faulthandler, which appends one at every signal, or each time a timer ends."""
    threads: dict[str, tuple[bool, list[Frame]]] = {}
    for line in text.splitlines():
        if match := re.search(r"(Current thread|Thread) (0x[0-9a-fA-F]+).{0,80}\(most recent call first\)", line):
            # One dump holds each thread once.
            threads = {} if match[2] in threads else threads
            threads[match[2]] = match[1] == "Current thread", []
        elif line.startswith("Timeout ("):  # a timer's dump, which has no current thread
            threads = {}
        elif threads and (match := re.match(r'\s*File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$', line)):
            number = int(match[2]) if match[2].isdigit() else 0
            [*threads.values()][-1][1].append(frame(match[3], match[1], number))
    last = tuple(Thread(frames=tuple(frames), is_current=current) for current, frames in threads.values())
    return Dump(threads=last, cut=not text.endswith("\n"))


def read_traceback(text: str) -> Dump | None:
    """The first traceback of a log as a stack, with the exception as its `error`; None where there is none."""
    # Of chained tracebacks the first holds the cause. Lines may have a label, such as "[rank3]: ".
    call = re.compile(r'^(?:\[?\w+\]?: ?)?\s*File "(.*)", line (\d{1,9}), in (.*)$')
    raised = re.compile(r"^(?:\[?[\w ]+\]?: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Timeout)\b.*)$")
    frames = list[Frame]()
    for line in text[text.find("Traceback (most recent call last):") :].splitlines():
        if match := call.match(line):
            frames.append(frame(match[3], match[1], int(match[2])))
        elif frames and (match := raised.match(line.strip())):
            return Dump(threads=(Thread(frames=tuple(reversed(frames)), name="MainThread"),), error=match[1].strip())
    return None


@dataclass(frozen=True, kw_only=True)
class LastCall(Record):
    """The end of a rank's trace: the function entered last, and the last line run."""

    rank: str
    function: str
    line: str
    bytes: int


@dataclass(frozen=True, kw_only=True)
class LastCalls(Record):
    """The ends of all traces; `groups` are the places where they end, the rarest first, which are the suspects."""

    calls: tuple[LastCall, ...]
    DERIVED = ("groups",)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Function, line and ranks of each place."""
        same = grouped(self.calls, lambda call: (call.function, call.line))
        places = [{"function": f, "line": line, "ranks": [c.rank for c in same[f, line]]} for f, line in same]
        return sorted(places, key=lambda place: (len(place["ranks"]), place["function"]))

    def to_text(self) -> str:
        """A line for each place."""
        lines = [f"{len(self.calls)} traces, {sum(c.bytes for c in self.calls) / 1e9:.2f} GB; where they end:"]
        lines += [
            "{:5d}  {function}  {line}: {}".format(len(g["ranks"]), ", ".join(g["ranks"][:12]), **g)
            for g in self.groups
        ]
        return "\n".join(lines)


def last_calls(folder: Path) -> LastCalls:
    """The last call of every trace file below `folder`, in the order of their names; ValueError where there is none.

    Python's `trace` writes ` --- modulename: M, funcname: F` and then `file.py(12): code` for each line. Other files
    are ignored.
    """
    require_folder("folder", folder)
    paths = sorted((p for p in folder.rglob("*") if p.is_file()), key=lambda p: natural(p.name))
    with ThreadPoolExecutor(8) as pool:  # most time is spent waiting for a shared file system
        found = tuple(call for call in pool.map(_last_call, paths) if call is not None)
    require(bool(found), "folder", folder, "holds no trace of Python's trace module")
    return LastCalls(calls=found)


def _last_call(path: Path) -> LastCall | None:
    size = path.stat().st_size
    with path.open("rb") as file:
        # A trace may have gigabytes. Its last MB has some 40,000 lines: a loop may run them and call nothing.
        file.seek(max(0, size - (1 << 20)))
        tail = file.read(1 << 20).decode("utf-8", "replace")
    entered = re.findall(r"(?m)^ --- modulename: (.+?), funcname: (.+)$", tail)[-1:]
    ran = re.findall(r"(?m)^([\w.<>/-]+\.py|<[\w ]+>)\((\d+)\): ?(.*)$", tail)[-1:]
    function = "".join(f"{name.strip()} ({module})" for module, name in entered)
    line = "".join(f"{file}:{number}  {code.strip()[:120]}" for file, number, code in ran)
    match = re.search(r"rank[_-]?(\d+)", path.name)
    return LastCall(rank=match[1] if match else path.stem, function=function, line=line, bytes=size) if ran else None
