"""What each rank of a hanging job does, by its stack: it waits (for what), works on the host, is
gone.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from trilane.utils.tables import grouped
from trilane_diagnose.evidence import Evidence
from trilane_diagnose.stacks import Frame, Frames, patterns

HARD = ("gone", "stopped", "locked")  # kinds of ranks that do not go on
NO_EVIDENCE = ("unreadable", "unknown")  # kinds from which nothing is concluded
OTHER = "other"  # axis of a group of experts, or of a sequence's parts
Key = tuple[tuple[str, str, int], ...]  # of frames


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A wait in `op`, which `site` calls: an operation, "device" (what was queued on the GPU), or
    "line" (where most ranks compute or wait).
    """

    op: str
    site: Frame
    axis: str  # of the group, by names in the stack, or OTHER; "" if none shows it
    path: Key  # the calling frames outwards, without wrappers and torch's own

    def __str__(self) -> str:
        where = {"device": "for their GPUs in", "line": "for their GPUs, or compute, in"}
        return f"{where.get(self.op, f'in {self.op}, called by')} {self.site}"

    @cached_property
    def call(self) -> Key:
        """Identifies the call in the program: its functions and lines, from the caller of the
        operation outwards.
        """
        # The root of a broadcast, and of any other operation that has one, calls it at a line of
        # its own.
        rooted = patterns("functions")["rooted"].fullmatch(self.op)
        return tuple((*key[:2], 0) for key in self.path) if rooted else self.path

    @property
    def is_blind(self) -> bool:
        """Whether the stack does not show which operation it waits for."""
        return self.op in ("device", "line")

    @property
    def p2p(self) -> bool:
        """Whether it waits for one neighbour."""
        return self.axis in ("next", "previous") or self.op in (
            "send",
            "recv",
            "isend",
            "irecv",
            "batch_isend_irecv",
        )


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What one rank does: its kind (HARD, NO_EVIDENCE, silent, busy or waiting), a description, and
    its stack.
    """

    kind: str
    text: str
    frames: Frames = ()
    wait: Wait | None = None
    moves: bool = False  # an earlier dump has another stack
    # Any other busy rank may wait for its GPU: `.item()`, `.cpu()` and a launch into a full queue
    # are C++.
    on_host: bool = False

    @cached_property
    def key(self) -> Key:
        """Identifies the stack across tools."""
        return tuple(frame.key for frame in self.frames)


Conditions = dict[int, Condition]  # by rank


def conditions(evidence: Evidence) -> Conditions:
    """The condition of every rank of the grid."""
    ranks, dumped = evidence.grid.ranks, {*evidence.dumps, *evidence.recordings}
    # Where fewer than half of the dumps are missing each counts against its rank; else those ranks
    # were not dumped.
    without = "silent" if 2 * len(dumped | {*evidence.unreadable}) > len(ranks) else "unknown"
    found = {rank: _condition(rank, evidence, without) for rank in ranks}
    stacks = Counter(c.key for c in found.values() if c.frames)
    locked = [rank for rank, c in found.items() if c.kind == "locked"]
    for rank in locked:
        # A thread that runs Python holds its lock for an instant: in many ranks it is no cause.
        if 2 * stacks[found[rank].key] >= stacks.total() > 1 or len(locked) > max(
            1, len(dumped) / 8
        ):
            found[rank] = _by_stack(rank, evidence)
    # Most ranks at one line outside communication wait for their GPUs.
    outside = [r for r, c in found.items() if c.kind == "busy" and c.frames and not c.on_host]
    for crowd in grouped(outside, lambda rank: found[rank].key).values():
        for rank in crowd if 2 * len(crowd) > stacks.total() > 1 else ():
            wait, text = _wait("line", found[rank].frames, ""), "computes, or waits for its GPU"
            found[rank] = replace(found[rank], kind="waiting", text=text, wait=wait, moves=False)
    return found


def _condition(rank: int, evidence: Evidence, without: str) -> Condition:
    """The condition of a rank; its kind is `without` where there is no stack of it."""
    dump, state = evidence.dumps.get(rank), evidence.grid[rank].state
    frames = dump.frames if dump else ()
    kinds = {
        "gone": "gone",
        "X": "gone",
        "Z": "gone",
        "T": "stopped",
        "t": "stopped",
    }  # of states in proc(5)
    if state in kinds:
        return Condition(
            kind=kinds[state], text=f"the process is {kinds[state]} (state {state})", frames=frames
        )
    if dump is None and rank in evidence.recordings:
        idle = evidence.recordings[rank].waiting is None
        text = "outside any collective" if idle else "only its Flight Recorder was dumped"
        return Condition(kind="busy" if idle else "waiting", text=text, on_host=idle)
    if not frames and (rank in evidence.unreadable if dump is None else not dump.error):
        return Condition(kind="unreadable", text="its dump cannot be read")
    if dump is None:
        return Condition(kind=without, text="no dump: the process has ended, or was not dumped")
    if not frames:
        return Condition(kind=without, text=f"its stack could not be taken ({dump.error})")
    if dump.holder:
        return Condition(kind="locked", text=f"its thread {dump.holder}", frames=frames)
    return _by_stack(rank, evidence)


def _by_stack(rank: int, evidence: Evidence) -> Condition:
    """The condition by the stack alone."""
    dump, before = evidence.dumps[rank], evidence.earlier.get(rank)
    frames = dump.frames
    earlier = [frame.key for frame in before.frames] if before else []
    moves = bool(earlier) and earlier != [frame.key for frame in frames]
    found = {table: _first_match(table, frames[:8]) for table in ("purposes", "calls", "parts")}
    on_host = bool(found["purposes"] or found["calls"])
    if wait := wait_of(frames):
        return Condition(
            kind="waiting", text=f"in {wait.op}", frames=frames, wait=wait, moves=moves
        )
    sleeps = ", in state D (uninterruptible)" if evidence.grid[rank].state == "D" else ""
    # what waits for a GPU has released the GIL
    on_host = on_host or bool(sleeps) or dump.owns_gil
    text = next(filter(None, found.values()), "outside communication") + sleeps
    return Condition(kind="busy", text=text, frames=frames, moves=moves, on_host=on_host)


def wait_of(frames: Frames) -> Wait | None:
    """What a stack waits for; None where its innermost frame does not communicate."""
    inside = [_communicates(f) or _is(f, "wrappers") for f in frames]
    inner = next(
        (i for i, f in enumerate(frames) if _communicates(f) or not inside[i]), len(frames)
    )
    if inner == len(frames):
        return None
    at, device = frames[inner], patterns("files")["device"]
    if device.search(at.file) and _is(at, "device_waits"):
        above = [
            f for f in frames[inner:] if not (_is(f, "wrappers") or device.search(f.file))
        ] or [at]
        return _wait("device", above, _first_match("axes", above[:1]))
    if not inside[inner]:
        return None
    end = next((i for i in range(inner, len(frames)) if not inside[i]), len(frames))
    called, callers = frames[inner:end], frames[end:]
    op = next((f for f in called if _is(f, "collectives")), at)
    p2p = [f for f in called if "p2p" in f.file]
    # Four frames show what a collective is for; further out is the training loop.
    axis = (
        OTHER
        if op.function.startswith("all_to_all")
        else _first_match("axes", [*p2p, *callers[:4]])
    )
    return _wait(op.function, callers or [at], axis)


def _wait(op: str, callers: Sequence[Frame], axis: str) -> Wait:
    own = patterns("files")["torch"]
    path = tuple(f.key for f in callers if not (_is(f, "wrappers") or own.search(f.file)))
    return Wait(op=op, site=callers[0], axis=axis, path=path or (callers[0].key,))


def _first_match(table: str, frames: Iterable[Frame]) -> str:
    # from the innermost frame outwards
    names = (f"{frame.function} {frame.file}" for frame in frames)
    return next(
        (key for name in names for key, pattern in patterns(table).items() if pattern.search(name)),
        "",
    )


def _is(frame: Frame, kind: str) -> bool:
    return bool(patterns("functions")[kind].fullmatch(frame.function))


def _communicates(frame: Frame) -> bool:
    known = patterns("files")["communication"].search(frame.file)
    return bool(known) or (_is(frame, "collectives") and "distributed" in frame.file)
