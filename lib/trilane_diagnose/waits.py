"""What each rank of a hanging job does, by its stack: it waits (for what), works on the host, is
gone.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from trilane.utils.frozen import frozen
from trilane.utils.tables import grouped
from trilane.utils.validation import shipped_json
from trilane_diagnose.evidence import Evidence
from trilane_diagnose.stacks import Frame, Frames, patterns

HARD = ("gone", "stopped")  # kinds of ranks that do not go on
NO_EVIDENCE = ("unreadable", "unknown")  # kinds from which nothing is concluded
OTHER = "other"  # axis of a group of experts, or of a sequence's parts
# kinds of ranks by the state of their process in proc(5)
KIND_OF_STATE = shipped_json("hang_patterns")["states"]
P2P = ("send", "recv", "isend", "irecv", "batch_isend_irecv")
INNER = 8  # frames that show what a rank does on the host
CALLERS = 4  # frames that show what a collective is for; further out is the training loop
Key = tuple[tuple[str, str, int], ...]  # of frames


@frozen
class Wait:
    """A wait in `op`, which `site` calls: an operation, "device" (what was queued on the GPU), or
    "line" (where most ranks compute or wait).
    """

    op: str
    site: Frame
    axis: str  # of the group, by names in the stack, or OTHER; "" if none shows it
    path: Key  # the calling frames outwards, without wrappers and torch's own

    def __str__(self) -> str:
        if self.op == "device":
            return f"for their GPUs in {self.site}"
        if self.op == "line":
            return f"for their GPUs, or compute, in {self.site}"
        return f"in {self.op}, called by {self.site}"

    @cached_property
    def call(self) -> Key:
        """Identifies the call in the program: its functions and lines, from the caller of the
        operation outwards.
        """
        # The root of a broadcast, and of any other operation that has one, calls it at a line of
        # its own.
        if patterns("functions")["rooted"].fullmatch(self.op):
            return tuple((function, file, 0) for function, file, _ in self.path)
        return self.path

    @property
    def is_blind(self) -> bool:
        """Whether the stack does not show which operation it waits for."""
        return self.op in ("device", "line")

    @property
    def p2p(self) -> bool:
        """Whether it waits for one neighbour."""
        return self.axis in ("next", "previous") or self.op in P2P


@frozen
class Condition:
    """What one rank does: its kind (HARD, NO_EVIDENCE, silent, busy or waiting), a description, and
    its stack.
    """

    kind: str
    text: str
    frames: Frames = ()
    wait: Wait | None = None
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
    ranks = evidence.grid.ranks
    # Where fewer than half of the dumps are missing each counts against its rank; else those ranks
    # were not dumped.
    dumped = {*evidence.dumps, *evidence.recordings, *evidence.unreadable}
    most_are_there = 2 * len(dumped) > len(ranks)
    without = "silent" if most_are_there else "unknown"
    found = {rank: _condition(rank, evidence, without) for rank in ranks}
    stacks = sum(bool(condition.frames) for condition in found.values())
    # Most ranks at one line outside communication wait for their GPUs.
    outside = [
        rank for rank, own in found.items() if own.kind == "busy" and own.frames and not own.on_host
    ]
    for crowd in grouped(outside, lambda rank: found[rank].key).values():
        if not 2 * len(crowd) > stacks > 1:
            continue
        for rank in crowd:
            found[rank] = replace(
                found[rank],
                kind="waiting",
                text="computes, or waits for its GPU",
                wait=_wait("line", found[rank].frames, ""),
            )
    return found


def _condition(rank: int, evidence: Evidence, without: str) -> Condition:
    """The condition of a rank; its kind is `without` where there is no stack of it."""
    dump = evidence.dumps.get(rank)
    frames = dump.frames if dump else ()
    state = evidence.grid[rank].state
    if state in KIND_OF_STATE:
        kind = KIND_OF_STATE[state]
        return Condition(kind=kind, text=f"the process is {kind} (state {state})", frames=frames)
    if not dump:
        recording = evidence.recordings.get(rank)
        if recording and recording.waiting:
            return Condition(kind="waiting", text="only its Flight Recorder was dumped")
        if recording:
            return Condition(kind="busy", text="outside any collective", on_host=True)
        if rank in evidence.unreadable:
            return Condition(kind="unreadable", text="its dump cannot be read")
        return Condition(kind=without, text="no dump: the process has ended, or was not dumped")
    if not dump.frames and not dump.error:
        return Condition(kind="unreadable", text="its dump cannot be read")
    if not dump.frames:
        return Condition(kind=without, text=f"its stack could not be taken ({dump.error})")
    return _by_stack(rank, evidence)


def _by_stack(rank: int, evidence: Evidence) -> Condition:
    """The condition by the stack alone."""
    dump = evidence.dumps[rank]
    frames = dump.frames
    wait = wait_of(frames)
    if wait:
        return Condition(kind="waiting", text=f"in {wait.op}", frames=frames, wait=wait)
    inner = frames[:INNER]
    work = _first_match("purposes", inner) or _first_match("calls", inner)
    text = work or _first_match("parts", inner) or "outside communication"
    # what waits for a GPU has released the GIL
    on_host = bool(work) or dump.owns_gil
    if evidence.grid[rank].state == "D":
        text += ", in state D (uninterruptible)"
        on_host = True
    return Condition(kind="busy", text=text, frames=frames, on_host=on_host)


def wait_of(frames: Frames) -> Wait | None:
    """What a stack waits for; None where its innermost frame does not communicate."""
    places = range(len(frames))
    inside = [_communicates(frame) or _is(frame, "wrappers") for frame in frames]
    inner = next((i for i in places if _communicates(frames[i]) or not inside[i]), None)
    if inner is None:
        return None
    at = frames[inner]
    device = patterns("files")["device"]
    if device.search(at.file) and _is(at, "device_waits"):
        outer = frames[inner:]
        callers = [f for f in outer if not (_is(f, "wrappers") or device.search(f.file))]
        callers = callers or [at]
        return _wait("device", callers, _first_match("axes", callers[:1]))
    if not inside[inner]:
        return None
    end = next((i for i in places[inner:] if not inside[i]), len(frames))
    called = frames[inner:end]
    callers = [*frames[end:]]
    op = next((frame for frame in called if _is(frame, "collectives")), at).function
    axis = OTHER
    if not op.startswith("all_to_all"):
        p2p = [frame for frame in called if "p2p" in frame.file]
        axis = _first_match("axes", [*p2p, *callers[:CALLERS]])
    return _wait(op, callers or [at], axis)


def _wait(op: str, callers: Sequence[Frame], axis: str) -> Wait:
    torch = patterns("files")["torch"]
    own = [f for f in callers if not (_is(f, "wrappers") or torch.search(f.file))]
    path = tuple(frame.key for frame in own or callers[:1])
    return Wait(op=op, site=callers[0], axis=axis, path=path)


def _first_match(table: str, frames: Iterable[Frame]) -> str:
    """The key of the first pattern that a frame matches, from the innermost frame outwards."""
    for frame in frames:
        name = f"{frame.function} {frame.file}"
        for key, pattern in patterns(table).items():
            if pattern.search(name):
                return key
    return ""


def _is(frame: Frame, kind: str) -> bool:
    return bool(patterns("functions")[kind].fullmatch(frame.function))


def _communicates(frame: Frame) -> bool:
    if patterns("files")["communication"].search(frame.file):
        return True
    return _is(frame, "collectives") and "distributed" in frame.file
