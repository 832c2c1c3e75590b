"""The condition of each rank of a hanging job: waiting (for what, by its stack), busy, without a dump, gone."""

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources

from trilane.diagnose.hang.evidence import Evidence
from trilane.diagnose.hang.stack import Frame, Key
from trilane.utils.tables import grouped

HARD = ("gone", "crashed", "stopped", "locked")
KINDS = (*HARD, "silent", "busy", "soft", "waiting", "unreadable", "unknown")
NO_EVIDENCE = ("unreadable", "unknown")  # nothing is concluded from these

# Errors of a rank that failed because another was gone.
FOLLOWS = re.compile(
    r"[Cc]onnection (?:was likely )?(?:closed|reset|refused)|[Bb]roken pipe|by peer|[Tt]imed? ?out|NCCL|DistBackend"
    r"|[Ww]atchdog|SIGTERM|SignalException|gloo|Interrupt"
)

SILENT_SHARE = 0.5  # of missing dumps, below which one counts against its rank; above it, those ranks were not dumped
LOCKED_SHARE = 1 / 8  # in more ranks than this a thread that holds the GIL is not the cause
CROWD = 0.5  # of the dumps: ranks with one stack outside communication in more than this share wait for their GPU
ON_HOST = (  # activities of data/hang_patterns.json that are no wait for the GPU, however many ranks are in one
    *("in the data loader", "in checkpoint input/output", "compiling", "waiting for a lock"),
    "reading or writing a file",
)
CALLERS = 4  # frames that show what a collective is for; further out is the training loop


@cache
def patterns(table: str) -> dict[str, re.Pattern[str]]:
    """A table of data/hang_patterns.json: "functions" by name, or "files", "axes" and "activities" by expressions."""
    values = json.loads(resources.files("trilane").joinpath("data/hang_patterns.json").read_text(encoding="utf-8"))
    return {key: re.compile("|".join(parts), re.I * (table == "activities")) for key, parts in values[table].items()}


def is_function(frame: Frame, kind: str) -> bool:
    """Whether the frame's function is one of the "wrappers", "collectives", "all_ranks" or "device_waits"."""
    return bool(patterns("functions")[kind].fullmatch(frame.function))


def first_match(table: str, frames: Iterable[Frame]) -> str:
    """The first entry of "axes" or "activities" that matches, from the innermost frame outwards; "" where none does."""
    names = (f"{frame.function} {frame.file}" for frame in frames)
    return next((key for name in names for key, pattern in patterns(table).items() if pattern.search(name)), "")


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A wait in `op`, called by `site`; `axis` is the group axis by names in the stack, "" where they do not show it.

    `path` are the keys of the calling frames outwards, without wrappers and torch's own; `phase` is the part of an
    iteration, "" where the stack does not show it. `op` "device" is a wait for the GPU, whose queue holds some
    collective that the stack does not show.
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
    def p2p(self) -> bool:
        """Whether it waits for one neighbour."""
        return self.axis in ("next", "previous") or self.op in ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def wait_of(frames: Sequence[Frame]) -> Wait | None:
    """What a stack (innermost frame first) waits for; None where its innermost frame does not communicate."""
    wrapped = [is_function(f, "wrappers") for f in frames]
    inner = next((i for i, f in enumerate(frames) if not wrapped[i] or _communicates(f)), len(frames))
    if inner == len(frames):
        return None
    at, device = frames[inner], patterns("files")["device"]
    if device.search(at.file) and is_function(at, "device_waits"):
        above = [f for f in frames[inner:] if not (is_function(f, "wrappers") or device.search(f.file))]
        return _wait("device", above or [at], first_match("axes", above[:1]), frames)
    if not _communicates(at):
        return None
    last = inner
    while last + 1 < len(frames) and (wrapped[last + 1] or _communicates(frames[last + 1])):
        last += 1
    inside, callers = frames[inner : last + 1], frames[last + 1 :]
    op = next((f for f in inside if is_function(f, "collectives")), at)
    axis = _direction(inside) or first_match("axes", callers[:CALLERS])
    axis = axis or ("world" if is_function(op, "all_ranks") else "")
    return _wait(op.function, callers or [at], axis, frames)


def _wait(op: str, callers: Sequence[Frame], axis: str, frames: Sequence[Frame]) -> Wait:
    """The Wait in `op`, called by the first of the `callers`, in a stack of these `frames`."""
    own = patterns("files")["torch"]
    path = tuple(f.key for f in callers if not (is_function(f, "wrappers") or own.search(f.file)))
    return Wait(op=op, site=callers[0], axis=axis, path=path or (callers[0].key,), phase=phase_of(frames))


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
    axis = first_match("axes", frames[:1])
    return _wait("wait", frames, axis, frames) if axis else None


def _communicates(frame: Frame) -> bool:
    known = patterns("files")["communication"].search(frame.file) is not None
    return known or (is_function(frame, "collectives") and "distributed" in frame.file)


# From the strongest evidence against a rank to the weakest.


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What one rank does: one of KINDS, a description, its stack, what it waits for, and whether it `moves`: an earlier
    dump has another stack."""

    kind: str
    text: str
    frames: tuple[Frame, ...] = ()
    wait: Wait | None = None
    moves: bool = False


Conditions = dict[int, Condition]  # by rank


def conditions(evidence: Evidence) -> Conditions:
    """The condition of every rank of the grid."""
    grid = evidence.grid
    seen = {*evidence.dumps, *evidence.recordings}
    missing = 1 - len(seen | set(evidence.unreadable)) / len(grid.ranks)
    without = "silent" if missing < SILENT_SHARE else "unknown"
    found = {rank: _condition(rank, evidence, without) for rank in grid.ranks}
    locked = [rank for rank, c in found.items() if c.kind == "locked"]
    if len(locked) > max(1, LOCKED_SHARE * len(seen)):
        found |= {rank: _by_stack(rank, evidence) for rank in locked}
    return _device_waits(found)


def _condition(rank: int, evidence: Evidence, without: str) -> Condition:
    """The condition of a rank; its kind is `without` where there is no stack of it."""
    place, dump = evidence.grid[rank], evidence.dumps.get(rank)
    frames = dump.main.frames if dump else ()
    if place.state in ("gone", "Z", "X"):
        return Condition(kind="gone", text="its process is gone", frames=frames)
    if place.state in ("T", "t"):
        return Condition(kind="stopped", text="its process is stopped (state T)", frames=frames)
    if dump is None:
        if rank in evidence.recordings:
            idle = evidence.recordings[rank].waiting is None
            text = "outside any collective" if idle else "only its Flight Recorder was dumped"
            return Condition(kind="busy" if idle else "waiting", text=text)
        if rank in evidence.unreadable:
            return Condition(kind="unreadable", text="its dump cannot be read")
        return Condition(kind=without, text="it has no dump")
    if not frames and dump.cut:
        return Condition(kind="unreadable", text="its dump is truncated before its main thread")
    if not frames:
        return Condition(kind=without, text=f"its stack could not be taken ({dump.error or 'empty dump'})")
    if dump.error and not FOLLOWS.search(dump.error) and "py-spy" not in dump.error:
        return Condition(kind="crashed", text=f"raised {dump.error[:160]}", frames=frames)
    holder, before = dump.gil_holder, evidence.earlier.get(rank)
    if holder is not None and (before is None or before.gil_holder is not None):  # held for an instant if not before
        text = f"its thread {holder.name or '(unnamed)'} holds Python's global lock in {holder.frames[0]}"
        return Condition(kind="locked", text=text, frames=frames)
    return _by_stack(rank, evidence)


def _by_stack(rank: int, evidence: Evidence) -> Condition:
    """The condition by the stack alone."""
    frames = evidence.dumps[rank].main.frames
    before = evidence.earlier.get(rank)
    moves = before is not None and bool(before.main.frames) and stack_key(before.main.frames) != stack_key(frames)
    wait, soft = wait_of(frames), soft_wait(frames)
    kind, text = "soft" if soft else "busy", first_match("activities", frames[:8]) or "outside communication"
    if wait is not None:
        kind, text = "waiting", f"in {wait.op}"
    if kind == "busy" and evidence.grid[rank].state == "D":
        text += ", in uninterruptible sleep (state D): a file system or a driver does not answer"
    return Condition(kind=kind, text=text, frames=frames, wait=wait or soft, moves=moves)


def stack_key(frames: tuple[Frame, ...]) -> tuple[tuple[str, str, int], ...]:
    """Identifies a stack across tools."""
    return tuple(frame.key for frame in frames)


def _device_waits(found: Conditions) -> Conditions:
    """The conditions, where most ranks are at the same line outside communication changed to waiting for their GPU."""
    outside = [r for r, c in found.items() if c.kind in ("busy", "soft") and c.frames and c.text not in ON_HOST]
    stacks = sum(1 for c in found.values() if c.frames)
    for ranks in grouped(outside, lambda rank: stack_key(found[rank].frames)).values():
        if len(ranks) > CROWD * stacks and stacks > 1:
            for rank in ranks:
                c = found[rank]
                wait = c.wait or _wait("device", c.frames, "", c.frames)
                found[rank] = Condition(kind="waiting", text="waits", frames=c.frames, wait=wait)
    return found


def majority_step(evidence: Evidence) -> int:
    """The iteration that most ranks are in, by their heartbeats; -1 where there are none."""
    steps = Counter(p.progress for p in evidence.grid.places if p.step >= 0)
    return steps.most_common(1)[0][0] if steps else -1
