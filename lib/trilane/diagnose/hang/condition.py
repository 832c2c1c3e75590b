"""The condition of each rank of a hanging job: waiting (for what, by its stack), busy, without a dump, gone."""

import re
from collections import Counter
from dataclasses import dataclass, replace

from trilane.diagnose.hang.evidence import Evidence
from trilane.diagnose.hang.stack import Frame
from trilane.diagnose.hang.wait import Wait, activity, soft_wait, wait_at, wait_of
from trilane.utils.tables import grouped

HARD = ("gone", "crashed", "stopped", "locked")
KINDS = (*HARD, "silent", "busy", "soft", "waiting", "unreadable", "unknown")
NO_EVIDENCE = ("unreadable", "unknown")  # nothing is concluded from these

# Errors of a rank that failed because another was gone.
FOLLOWS = re.compile(
    r"[Cc]onnection (?:was likely )?(?:closed|reset|refused)|[Bb]roken pipe|by peer|[Tt]imed? ?out|NCCL|DistBackend"
    r"|[Ww]atchdog|SIGTERM|SignalException|gloo|Interrupt|Dist(?:Network|Store)Error|client socket|failed to recv"
    r"|Stop_waiting response|recvValue failed|Store ?Timeout"
)

SILENT_SHARE = 0.5  # of missing dumps, below which one counts against its rank; above it, those ranks were not dumped
LOCKED_SHARE = 1 / 8  # in more ranks than this a thread that holds the GIL is not the cause
CROWD = 0.5  # of the dumps: ranks with one stack outside communication in more than this share wait for their GPU


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What one rank does: one of KINDS, a description, its stack, what it waits for, and whether it `moves`: an earlier
    dump has another stack.

    `on_host`: it is known to work on the host; any other busy rank may wait at its line for its GPU (`.item()`,
    `.cpu()`, a launch into a full queue are C++). `aside` is an observation of which nothing follows for certain.
    """

    kind: str
    text: str
    frames: tuple[Frame, ...] = ()
    wait: Wait | None = None
    moves: bool = False
    on_host: bool = False
    aside: str = ""


Conditions = dict[int, Condition]  # by rank


def conditions(evidence: Evidence) -> Conditions:
    """The condition of every rank of the grid."""
    grid = evidence.grid
    seen = {*evidence.dumps, *evidence.recordings}
    missing = 1 - len(seen | set(evidence.unreadable)) / len(grid.ranks)
    without = "silent" if missing < SILENT_SHARE else "unknown"
    found = {rank: _condition(rank, evidence, without) for rank in grid.ranks}
    return _device_waits(found | _not_locked(evidence, found))


def _not_locked(evidence: Evidence, found: Conditions) -> Conditions:
    """The conditions by their stacks of ranks whose thread holds the GIL, where many do, or where the rank waits where
    half of the ranks do: any thread that runs Python holds the GIL for that instant."""
    locked = [rank for rank, c in found.items() if c.kind == "locked"]
    stacks = Counter(stack_key(c.frames) for c in found.values() if c.frames)
    many = len(locked) > max(1, LOCKED_SHARE * len({*evidence.dumps, *evidence.recordings}))
    usual = [rank for rank in locked if 2 * stacks[stack_key(found[rank].frames)] >= stacks.total() > 1]
    return {
        rank: replace(_by_stack(rank, evidence), aside="" if many else found[rank].text)
        for rank in (locked if many else usual)
    }


STATES = {  # of a process, in proc(5), that ends what it does
    **dict.fromkeys(("gone", "X"), ("gone", "the process is gone")),
    "Z": ("gone", "the process has ended (state Z)"),
    "T": ("stopped", "the process is stopped by a signal (state T)"),
    "t": ("stopped", "the process is stopped by a debugger or another tracer (state t)"),
}
SLEEPS = "in uninterruptible sleep (state D): a file system or a driver does not answer"


def _condition(rank: int, evidence: Evidence, without: str) -> Condition:
    """The condition of a rank; its kind is `without` where there is no stack of it."""
    place, dump = evidence.grid[rank], evidence.dumps.get(rank)
    frames = dump.main.frames if dump else ()
    if place.state in STATES:
        kind, text = STATES[place.state]
        return Condition(kind=kind, text=text, frames=frames)
    if not frames and place.state == "D":
        return Condition(kind="silent", text=f"no stack, and the process is {SLEEPS}", on_host=True)
    if dump is None:
        if rank in evidence.recordings:
            idle = evidence.recordings[rank].waiting is None
            text = "outside any collective" if idle else "only its Flight Recorder was dumped"
            return Condition(kind="busy" if idle else "waiting", text=text, on_host=idle)
        if rank in evidence.unreadable:
            return Condition(kind="unreadable", text="its dump cannot be read")
        return Condition(kind=without, text="no dump: the process has ended, or was not dumped")
    if not frames and dump.cut:
        return Condition(kind="unreadable", text="its dump is truncated before its main thread")
    if not frames:
        return Condition(kind=without, text=f"its stack could not be taken ({dump.error or 'empty dump'})")
    if dump.error and not FOLLOWS.search(dump.error) and "py-spy" not in dump.error:
        return Condition(kind="crashed", text=f"raised {dump.error[:160]}", frames=frames)
    holder, before = dump.gil_holder, evidence.earlier.get(rank)
    if holder is not None and (before is None or before.gil_holder is not None):  # held for an instant if not before
        text = f"its thread {holder.name or '(unnamed)'} holds Python's global lock in {holder.frames[0]}"
        return Condition(kind="locked", text=text + " in both dumps" * (before is not None), frames=frames)
    return _by_stack(rank, evidence)


def _by_stack(rank: int, evidence: Evidence) -> Condition:
    """The condition by the stack alone."""
    dump, before = evidence.dumps[rank], evidence.earlier.get(rank)
    frames = dump.main.frames
    moves = before is not None and bool(before.main.frames) and stack_key(before.main.frames) != stack_key(frames)
    moves = moves or rank in evidence.advanced
    wait, soft, sleeps = wait_of(frames), soft_wait(frames), evidence.grid[rank].state == "D"
    if wait is not None or soft is not None:
        kind, text = ("waiting", f"in {wait.op}") if wait else ("soft", "at a line that communicates")
        aside = f"its process was {SLEEPS}" if sleeps else ""
        return Condition(kind=kind, text=text, frames=frames, wait=wait or soft, moves=moves, aside=aside)
    does, on_host = activity(frames)
    text = (does or "outside communication") + (f", {SLEEPS}" if sleeps else "")
    # what waits for a GPU has released the GIL
    on_host = on_host or sleeps or bool(dump.main.owns_gil)
    return Condition(kind="busy", text=text, frames=frames, moves=moves, on_host=on_host)


def stack_key(frames: tuple[Frame, ...]) -> tuple[tuple[str, str, int], ...]:
    """Identifies a stack across tools."""
    return tuple(frame.key for frame in frames)


def _device_waits(found: Conditions) -> Conditions:
    """The conditions, where most ranks are at the same line outside communication changed to waiting there."""
    outside = [r for r, c in found.items() if c.kind in ("busy", "soft") and c.frames and not c.on_host]
    stacks = sum(1 for c in found.values() if c.frames)
    for ranks in grouped(outside, lambda rank: stack_key(found[rank].frames)).values():
        if len(ranks) > CROWD * stacks and stacks > 1:
            for rank in ranks:
                c = found[rank]
                wait = c.wait or wait_at("line", c.frames, "", c.frames)
                found[rank] = Condition(
                    kind="waiting", text="computes, or waits for its GPU", frames=c.frames, wait=wait
                )
    return found


def majority_step(evidence: Evidence) -> int:
    """The iteration that most ranks are in, by their heartbeats; -1 where there are none."""
    steps = Counter(p.progress for p in evidence.grid.places if p.step >= 0)
    return steps.most_common(1)[0][0] if steps else -1
