"""Stack dumps by Python itself: faulthandler (where py-spy may not attach), and tracebacks in a log."""

import re

from trilane.diagnose.hang.stack import Dump, Frame, Thread, frame

FAULT_THREAD = re.compile(r"(Current thread|Thread) (0x[0-9a-fA-F]+)(?: \[[^\[\]]*\])? \(most recent call first\)")
FAULT_FRAME = re.compile(r'File "(.*)", line (\d{1,9}|\?\?\?) in (.*)$')
TRACEBACK = re.compile(r"Traceback \(most recent call last\):\s*$")
CALL = re.compile(r'(?:\[?\w+\]?: ?)?\s*File "(.*)", line (\d{1,9}), in (.*)$')
RAISED = re.compile(r"^(?:\[?[\w ]+\]?: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Timeout)\b.*)$")


def read_faults(text: str) -> Dump:
    """The last dump in the text: faulthandler appends to its file at every signal, or each time a timer ends.

    One dump holds each thread once; that of a timer begins with a line of its own, and has no current thread.
    """
    threads: dict[str, tuple[bool, list[Frame]]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if match := FAULT_THREAD.search(line):
            threads = {} if match[2] in threads else threads
            frames = []
            threads[match[2]] = match[1] == "Current thread", frames
        elif line.startswith("Timeout ("):
            threads = {}
        elif match := FAULT_FRAME.match(line.strip()):
            frames.append(frame(match[3], match[1], int(match[2]) if match[2].isdigit() else 0))
    last = tuple(Thread(frames=tuple(frames), current=current) for current, frames in threads.values())
    return Dump(threads=last, cut=not text.endswith("\n"))


def read_traceback(text: str) -> Dump | None:
    """The first traceback of a log as a stack, with the exception as its `error`; None where there is none."""
    frames: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if TRACEBACK.search(line):
            # Of chained tracebacks the first holds the cause.
            inside = True
        elif inside and (match := CALL.match(line.strip())):
            frames.append(frame(match[3], match[1], int(match[2])))
        elif inside and frames and (match := RAISED.match(line.strip())):
            thread = Thread(frames=tuple(reversed(frames)), name="MainThread")
            return Dump(threads=(thread,), error=match[1].strip())
    return None
