"""Stack dump of one process, independent of the tool that wrote it: Frame, Thread, Dump, and their readers.

They read `py-spy dump` as text (of any number of processes in one file) or JSON; tracebacks.py reads Python's own.
"""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Any

# Outermost functions of a thread that Python started: never the training thread.
THREAD_STARTS = {"_bootstrap", "_bootstrap_inner"}

# Innermost function of a thread that waits for autograd's engine (torch/autograd/graph.py, autograd/__init__.py), and
# of one that calls the engine itself (megatron/core/pipeline_parallel/schedules.py).
AUTOGRAD = {"_engine_run_backward", "run_backward", "backward", "grad"}
ENGINE_CALLERS = {"custom_backward"}

# Names in the frames of a thread of autograd: functions with a backward, and hooks of parameters.
BACKWARD = re.compile(r"backward|autograd|hook|grad", re.I)

LONGEST = 400  # characters of a name that are kept

Key = tuple[str, str, int]  # function, file without its folders, line


@dataclass(frozen=True, order=True)
class Frame:
    """A stack frame: the function without its class, the end of the file's path, the line."""

    function: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"

    @property
    def key(self) -> Key:
        """Identifies the frame across tools, which report one file relative to different folders."""
        return self.function, self.file.rpartition("/")[2], self.line


def frame(function: str, file: str, line: int) -> Frame:
    """The Frame of a function, which may be qualified by its class, in a file, which may have an absolute path.

    Tools shorten paths differently: the last three parts are kept, below site-packages where the path has it.
    """
    inside = file[-LONGEST:].replace("\\", "/").rpartition("site-packages/")[2]
    name = function[-LONGEST:]
    return Frame(name.rpartition(".")[2] or name, "/".join(inside.split("/")[-3:]), line)


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread: its frames, innermost first, its number, and whether it held Python's GIL (None: unknown)."""

    frames: tuple[Frame, ...]
    name: str = ""
    number: str = ""
    owns_gil: bool | None = None
    current: bool = False


@dataclass(frozen=True, kw_only=True)
class Dump:
    """The stacks of one process. `pid` is 0 and `command` "" where unknown; `cut`: the text is truncated."""

    threads: tuple[Thread, ...]
    pid: int = 0
    command: str = ""
    error: str = ""
    cut: bool = False
    main: Thread = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "main", training_thread(self.threads, self.cut))

    @property
    def gil_holder(self) -> Thread | None:
        """The helper thread that holds the GIL while the training thread waits for it; None where there is none."""
        others = [t for t in self.threads if t.owns_gil and t.frames and t.frames != self.main.frames]
        helper = [t for t in others if t.name != self.main.name and _outermost(t) in THREAD_STARTS]
        return helper[0] if helper else None


def training_thread(threads: tuple[Thread, ...], cut: bool) -> Thread:
    """The main thread, with autograd's frames on top where it waits for its backward pass.

    With CUDA the backward pass, and so the collectives in it, runs in a thread of autograd that Python did not start;
    it holds only the frames of what C++ called: a function's backward, or a hook of a parameter. Of several such
    threads the one counts that does not itself wait for the engine (a backward pass within a backward pass).
    In a truncated dump (`cut`) an unmarked thread may be any: then the result has no frames.
    """
    if not threads:
        return Thread(frames=())
    python = [t for t in threads if t.frames and _outermost(t) not in THREAD_STARTS]
    named = [t for t in python if t.name == "MainThread"]
    rooted = [t for t in python if _outermost(t) in ("<module>", "_run_module_as_main", "_start", "main")]
    # faulthandler cuts a deep stack after a hundred frames, so that its root is missing.
    sure = named or rooted or [t for t in python if _calls_engine(t)] or [t for t in python if t.current]
    main = next(iter(sure or ([] if cut else python[-1:] or list(threads[-1:]))), Thread(frames=()))
    if _calls_engine(main):
        inside = [t for t in python if t is not main]
        inside = [t for t in inside if any(BACKWARD.search(f"{f.function} {f.file}") for f in t.frames)] or inside
        inside = sorted(inside, key=_calls_engine)
        if inside:
            return Thread(frames=inside[0].frames + main.frames, name=main.name, owns_gil=inside[0].owns_gil)
    return main


def _calls_engine(thread: Thread) -> bool:
    """Whether the thread waits for autograd's engine."""
    if not thread.frames:
        return False
    at = thread.frames[0]
    return at.function in ENGINE_CALLERS or (at.function in AUTOGRAD and "autograd" in at.file)


def _outermost(thread: Thread) -> str:
    return thread.frames[-1].function if thread.frames else ""


PROCESS = re.compile(r"^.{0,80}?Process (\d{1,9}): (.*)$")
THREAD = re.compile(r'^.{0,80}?Thread ((?:0x)?[0-9a-fA-F]+) \(([\w+ ]+)\)(?:: "(.*)")?')
LEAD = re.compile(r"(?:.{0,60}?:)?\s+(?=\S)")
LINE = re.compile(r":(\d{1,9})$")

# Frames that --native adds: `pthread_cond_wait (libc.so.6)`, without a line, or with that of a C++ source.
NATIVE = re.compile(r"\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|inl|S|rs)$")
ERROR = re.compile(r"^.{0,80}?(?:Error|Failed to [\w ]+): ?(.*)$")

# A frame object in truncated JSON.
PIECE = re.compile(r'"name":\s*"([^"]*)",\s*"filename":\s*"([^"]*)"[^{}]{0,2000}?"line":\s*(-?\d{1,9})')


def read_pyspy_text(text: str) -> list[Dump]:
    """The processes in a text of one host, in order; of a process that is there twice the last dump.

    A process whose stacks py-spy could not get has no threads, and an `error`. Where no line names the processes, each
    main thread begins one. Lines indented deeper than a thread's
    first frame are values (--locals) and may have any form.
    """
    found: list[Dump] = []
    head: tuple[int, str] | None = None
    threads: list[tuple[tuple[str, str, str], list[Frame]]] = []
    error = lead = ""

    def close() -> None:
        if head is not None or threads or error:
            made = tuple(
                Thread(name=name or "", number=number, owns_gil="gil" in state, frames=_python(frames))
                for (number, state, name), frames in threads
            )
            pid, command = head or (0, "")
            found.append(Dump(threads=made, pid=pid, command=command, error=error))

    lines = text.splitlines()
    for line in lines:
        if lead and line.startswith(lead + " "):
            continue
        if match := PROCESS.match(line):
            close()
            head, threads, error, lead = (int(match[1]), match[2].strip()), [], "", ""
        elif match := THREAD.match(line):
            if head is None and match[3] == "MainThread" and any(name == "MainThread" for (_, _, name), _ in threads):
                close()
                threads, error = [], ""
            threads.append(((match[1], match[2], match[3]), []))
            lead = ""
        elif threads and (found_frame := _frame(line)):
            lead = lead or found_frame[0]
            threads[-1][1].append(found_frame[1])
        elif match := ERROR.match(line):
            error = error or match[0].strip()
    close()
    found = _once(found)
    cut = bool(found) and not text.endswith("\n") and not _frame(lines[-1])  # py-spy's text ends with a whole line
    return [*found[:-1], replace(found[-1], cut=True)] if cut else found


def _once(dumps: list[Dump]) -> list[Dump]:
    """The dumps without those of a process of which a later one has stacks too; without a pid by its main thread."""
    last: dict[object, Dump] = {}
    for place, dump in enumerate(dumps):
        own = (dump.pid, "" if dump.pid else dump.main.number)
        known = own if any(own) else place
        if dump.threads or known not in last:
            last[known] = dump
    return list(last.values())


def read_pyspy_json(text: str) -> Dump:
    """The process in the output of `py-spy dump --json`; of truncated output, the frames that it holds."""
    try:
        threads = json.loads(text)
        return Dump(threads=tuple(map(_thread, threads)), pid=int(threads[0]["pid"]) if threads else 0)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError):
        return _salvaged(text)


def _frame(line: str) -> tuple[str, Frame] | None:
    """What stands before a frame `    forward (model.py:12)`, and the frame; None for other lines."""
    head, _, place = line.rstrip().rpartition(" (")
    lead = LEAD.match(head)
    if lead is None or len(place) < 2 or not place.endswith(")"):
        return None
    place = place[:-1]
    number = LINE.search(place, max(0, len(place) - 10))
    return lead[0], frame(
        head[lead.end() :], place[: number.start()] if number else place, int(number[1] if number else 0)
    )


def _python(frames: list[Frame]) -> tuple[Frame, ...]:
    """The frames without those of C and C++, which are alike for all waits; all frames where none is Python's."""
    return tuple(f for f in frames if f.line > 0 and not NATIVE.search(f.file)) or tuple(frames)


def _thread(values: dict[str, Any]) -> Thread:
    # The full path where there is one: stack.frame() shortens the paths of all tools alike.
    frames = [frame(f["name"], f.get("filename") or f["short_filename"], int(f["line"])) for f in values["frames"]]
    gil = values.get("owns_gil")
    return Thread(frames=_python(frames), name=values.get("thread_name") or "", owns_gil=gil)


def _salvaged(text: str) -> Dump:
    threads = []
    for part in re.split(r'(?="pid":)', text):
        if frames := _python([frame(name, file, int(line)) for name, file, line in PIECE.findall(part)]):
            name = re.search(r'"thread_name":\s*"([^"]*)"', part)
            gil = re.search(r'"owns_gil":\s*true', part) is not None
            threads.append(Thread(frames=frames, name=name[1] if name else "", owns_gil=gil))
    return Dump(threads=tuple(threads), cut=True)
