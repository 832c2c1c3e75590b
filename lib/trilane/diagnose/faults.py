"""What faulthandler writes (the fallback where py-spy may not attach), and Python's own tracebacks in a rank's log."""

import re

from trilane.diagnose.stack import Dump, Frame, Thread, frame

THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-fA-F]+(?: \[(.*?)\])? \(most recent call first\)")
FRAME = re.compile(r'^\s*File "(.*)", line (\d+|\?\?\?) in (.*?)\s*$')
TRACEBACK = re.compile(r"Traceback \(most recent call last\):\s*$")
CALL = re.compile(r'^\s*(?:\[?\w+\]?: ?)?\s*File "(.*)", line (\d+), in (.*?)\s*$')
RAISED = re.compile(r"^(?:\[?[\w ]+\]?: ?)?((?:\w+\.)*\w*(?:Error|Exception|Interrupt|Exit|Timeout)\b.*)$")


def read_faults(text: str) -> Dump:
    """The last dump of the text: faulthandler adds to its file at every signal."""
    dumps = re.split(r"(?=^Current thread)", text, flags=re.M)
    blocks = _blocks(text)
    # One dump holds each thread once and exactly one current thread, the last named but for those of other signals.
    last = max((i for i, (header, _) in enumerate(blocks) if header == "Current thread"), default=len(blocks) - 1)
    before = max((i for i, (header, _) in enumerate(blocks[:last]) if header == "Current thread"), default=-1)
    chosen = blocks[before + 1 :] if len(dumps) > 2 else blocks
    threads = tuple(Thread(frames=tuple(frames), current=header == "Current thread") for header, frames in chosen)
    return Dump(threads=threads, cut=not text.endswith("\n"))


def _blocks(text: str) -> list[tuple[str, list[Frame]]]:
    blocks: list[tuple[str, list[Frame]]] = []
    for line in text.splitlines():
        if match := THREAD.search(line):
            blocks.append((match[1], []))
        elif blocks and (match := FRAME.match(line)):
            blocks[-1][1].append(frame(match[3], match[1], int(match[2]) if match[2].isdigit() else 0))
    return blocks


def read_traceback(text: str) -> Dump | None:
    """The first traceback of a log as a stack, and what was raised as its `error`; None where there is none."""
    frames: list[Frame] = []
    inside = False
    for line in text.splitlines():
        if TRACEBACK.search(line):
            # A chained traceback follows the first, which holds the cause.
            inside = True
        elif inside and (match := CALL.match(line)):
            frames.append(frame(match[3], match[1], int(match[2])))
        elif inside and frames and (match := RAISED.match(line.strip())):
            thread = Thread(frames=tuple(reversed(frames)), name="MainThread")
            return Dump(threads=(thread,), error=match[1].strip())
    return None
