"""Stack dumps by `py-spy dump`: text of any number of processes in one file, or JSON."""

import json
import re
from dataclasses import replace
from typing import Any

from trilane.diagnose.hang.stack import Dump, Frame, Thread, frame

PROCESS = re.compile(r"^.{0,80}?Process (\d{1,9}): (.*)$")
THREAD = re.compile(r'^.{0,80}?Thread ((?:0x)?[0-9a-fA-F]+) \(([\w+ ]+)\)(?:: "(.*)")?')
LEAD = re.compile(r"(?:.{0,60}?:)?\s+(?=\S)")
LINE = re.compile(r":(\d{1,9})$")

# Frames that --native adds: `pthread_cond_wait (libc.so.6)`, without a line, or with that of a C++ source.
NATIVE = re.compile(r"\.(?:c|cc|cpp|cxx|cu|cuh|h|hpp|inl|S|rs)$")
# Of these, the calls in which a thread waits for its GPU (CUDA's runtime and driver, HIP, torch's item()).
DEVICE_WAIT = re.compile(r"^(?:cu|cuda|hip)(?:Stream|Event|Device|Ctx)Synchronize|^_local_scalar_dense_cuda")
ERROR = re.compile(r"^.{0,80}?(?:Error|Failed to [\w ]+): ?(.*)$")

# A frame object in truncated JSON.
PIECE = re.compile(r'"name":\s*"([^"]*)",\s*"filename":\s*"([^"]*)"[^{}]{0,2000}?"line":\s*(-?\d{1,9})')


def read_text(text: str) -> list[Dump]:
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


def read_json(text: str) -> Dump:
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
    """The frames without those of C and C++, which are alike for all other waits, but for a wait for the GPU; all
    frames where none is Python's."""
    kept = [f.line > 0 and not NATIVE.search(f.file) for f in frames]
    if not any(kept):
        return tuple(frames)
    device = [frame for frame in frames[: kept.index(True)] if DEVICE_WAIT.search(frame.function)]
    return (*device[:1], *(f for f, keep in zip(frames, kept, strict=True) if keep))


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
