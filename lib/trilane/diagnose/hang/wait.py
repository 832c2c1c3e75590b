"""Wait: what a stack waits for, by the functions and files of data/hang_patterns.json."""

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources

from trilane.diagnose.hang.stack import Frame, Key

ACTIVITIES = ("purposes", "calls", "parts")  # tables of data/hang_patterns.json, in their order
ACTIVITY_DEPTH = 8  # frames
OTHER = "other"  # axis of a group that tp, pp and dp do not give: of experts, or of a sequence's parts
CALLERS = 4  # frames that show what a collective is for; further out is the training loop


@cache
def patterns(table: str) -> dict[str, re.Pattern[str]]:
    """A table of data/hang_patterns.json: "functions" by name, or others by expressions."""
    values = json.loads(resources.files("trilane").joinpath("data/hang_patterns.json").read_text(encoding="utf-8"))
    return {key: re.compile("|".join(parts), re.I * (table in ACTIVITIES)) for key, parts in values[table].items()}


def is_function(frame: Frame, kind: str) -> bool:
    """Whether the frame's function is one of the "wrappers", "collectives", "all_ranks" or "device_waits"."""
    return bool(patterns("functions")[kind].fullmatch(frame.function))


def first_match(table: str, frames: Iterable[Frame]) -> str:
    """The first entry of a table by expressions that matches, from the innermost frame outwards; "" where none does."""
    names = (f"{frame.function} {frame.file}" for frame in frames)
    return next((key for name in names for key, pattern in patterns(table).items() if pattern.search(name)), "")


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A wait in `op`, called by `site`; `axis` is the group axis by names in the stack, or OTHER; "" if none shows it.

    `path` are the keys of the calling frames outwards, without wrappers and torch's own; `phase` is the part of an
    iteration, "" where the stack does not show it. `op` "device" is a wait for the GPU, for an operation queued before
    that the stack does not show; "line" is a line where most ranks are: they compute there, or wait for their GPUs.
    """

    op: str
    site: Frame
    axis: str
    path: tuple[Key, ...] = ()
    phase: str = ""

    def __str__(self) -> str:
        return f"{self.op}, called by {self.site}{self.phase and f' in {self.phase}'}"

    @cached_property
    def call(self) -> tuple[Key, ...]:
        """Identifies the call in the program: its functions and lines, from the one that calls the operation outwards.

        A broadcast, and any other operation with a root, is called by the root at a line of its own: of these only the
        functions count.
        """
        rooted = bool(patterns("functions")["rooted"].fullmatch(self.op))
        return tuple((function, file, 0 if rooted else line) for function, file, line in self.path)

    @property
    def is_blind(self) -> bool:
        """Whether the stack does not show which operation it waits for."""
        return self.op in ("device", "line")

    @property
    def p2p(self) -> bool:
        """Whether it waits for one neighbour."""
        return self.axis in ("next", "previous") or self.op in ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def wait_of(frames: Sequence[Frame]) -> Wait | None:
    """What a stack (innermost frame first) waits for; None where its innermost frame does not communicate."""
    if frames and frames[0].line == 0 and any(_communicates(f) for f in frames[1:3]):
        frames = frames[1:]  # the GPU is waited for within the collective
    wrapped = [is_function(f, "wrappers") for f in frames]
    inner = next((i for i, f in enumerate(frames) if not wrapped[i] or _communicates(f)), len(frames))
    if inner == len(frames):
        return None
    at, device = frames[inner], patterns("files")["device"]
    if device.search(at.file) and is_function(at, "device_waits"):
        above = [f for f in frames[inner:] if not (is_function(f, "wrappers") or device.search(f.file))]
        return wait_at("device", above or [at], first_match("axes", above[:1]), frames)
    if not _communicates(at):
        return None
    last = inner
    while last + 1 < len(frames) and (wrapped[last + 1] or _communicates(frames[last + 1])):
        last += 1
    inside, callers = frames[inner : last + 1], frames[last + 1 :]
    op = next((f for f in inside if is_function(f, "collectives")), at)
    axis = OTHER if op.function.startswith("all_to_all") else _direction(inside)
    axis = axis or first_match("axes", callers[:CALLERS])
    axis = axis or ("world" if is_function(op, "all_ranks") else "")
    return wait_at(op.function, callers or [at], axis, frames)


def wait_at(op: str, callers: Sequence[Frame], axis: str, frames: Sequence[Frame]) -> Wait:
    """The Wait in `op`, called by the first of the `callers`, in a stack of these `frames`."""
    own = patterns("files")["torch"]
    path = tuple(f.key for f in callers if not (is_function(f, "wrappers") or own.search(f.file)))
    return Wait(op=op, site=callers[0], axis=axis, path=path or (callers[0].key,), phase=phase_of(frames))


def activity(frames: Sequence[Frame]) -> tuple[str, bool]:
    """What a stack outside communication does, "" where its names do not show it, and whether that is on the host."""
    for table in ACTIVITIES:
        if found := first_match(table, frames[:ACTIVITY_DEPTH]):
            return found, table != "parts"
    return "", False


def phase_of(frames: Sequence[Frame]) -> str:
    """The part of an iteration that a stack is in: the first of "phases" that matches any frame; "" for none."""
    names = [f"{frame.function} {frame.file}" for frame in frames]
    return next((key for key, pattern in patterns("phases").items() if any(map(pattern.search, names))), "")


def _direction(frames: Sequence[Frame]) -> str:
    """The neighbour stage ("next", "previous") of pipeline communication; "pp" where unknown, "" for other frames."""
    names, axes = [f.function for f in frames if "p2p" in f.file], ("previous", "next")
    axis = next((axis for name in names for axis in axes if patterns("axes")[axis].search(name)), "")
    return axis or ("pp" if names else "")


def soft_wait(frames: Sequence[Frame]) -> Wait | None:
    """The wait of a stack whose innermost frame communicates, but is not in a collective; None for other stacks.

    `handle.wait()`, `.item()` and a launch on a full queue are C++: the innermost Python line is the caller's.
    """
    axis = "" if activity(frames)[1] else first_match("axes", frames[:1])
    return wait_at("wait", frames, axis, frames) if axis else None


def _communicates(frame: Frame) -> bool:
    known = patterns("files")["communication"].search(frame.file) is not None
    return known or (is_function(frame, "collectives") and "distributed" in frame.file)
