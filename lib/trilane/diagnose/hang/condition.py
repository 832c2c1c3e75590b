"""The condition of each rank of a hanging job: waiting (for what, by its stack), busy, without a dump, gone."""

import re
from collections import Counter
from dataclasses import dataclass

from trilane.diagnose.hang.evidence import Evidence
from trilane.diagnose.hang.stack import Frame
from trilane.diagnose.hang.wait import Wait, _wait, first_match, soft_wait, wait_of
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
