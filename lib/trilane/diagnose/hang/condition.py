"""Condition: what each rank of a hanging job does - waits, works, is silent, is gone - judged from its evidence."""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass

from trilane.diagnose.hang.evidence import Evidence
from trilane.diagnose.hang.stack import Dump, Frame
from trilane.diagnose.hang.waits import Wait, soft_wait, wait_of

# From the strongest evidence against a rank to the weakest.
HARD = ("gone", "crashed", "stopped", "locked")


KINDS = (*HARD, "silent", "busy", "soft", "waiting", "unreadable", "unknown")


UNHEARD = ("unreadable", "unknown")  # nothing is concluded from these


# What a rank says that broke because another was gone.
FOLLOWS = re.compile(
    r"[Cc]onnection (?:closed|reset|refused)|[Bb]roken pipe|by peer|[Tt]imed? ?out|NCCL|DistBackend|[Ww]atchdog|SIGTERM"
    r"|SignalException|gloo|Interrupt",
)


# The share of missing ranks up to which their silence speaks against them; above, nobody asked them.
SILENT_SHARE = 0.5


LOCKED_SHARE = 1 / 8  # threads that hold the lock in more ranks than that are no accident's cause


# A stack outside communication that more than this share of the dumps have is no culprit's: they wait for their card.
CROWD = 0.5


ACTIVITIES = [
    ("in the data loader", r"data_?loader|/data/|dataset|get_batch|sampler|_next_data|tokenizer|microbatches"),
    ("in checkpoint input/output", r"checkpoint|serialization\.py|torch_save|state_dict|safetensors"),
    ("waiting for a lock", r"threading\.py.*|(?:^|\b)acquire|filelock|lockf?\b"),
    ("reading or writing a file", r"\bread|\bwrite|open\b|fsync|socket\.py|ssl\.py|selectors\.py|subprocess\.py"),
    ("in the optimizer", r"optim|adam"),
    ("in the backward pass", r"backward|autograd"),
    ("in the forward pass", r"forward|nn/modules|attention|mlp"),
]


ACTIVITY = [(name, re.compile(pattern, re.I)) for name, pattern in ACTIVITIES]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What one rank does: a word of KINDS, the words for a person, its stack, and what it waits for."""

    rank: int
    kind: str
    text: str
    frames: tuple[Frame, ...] = ()
    wait: Wait | None = None
    moves: bool = False


def conditions(evidence: Evidence) -> dict[int, Condition]:
    """The condition of every rank of the grid."""
    grid = evidence.grid
    seen = {*evidence.dumps, *evidence.recordings}
    silence_speaks = 1 - len(seen | set(evidence.unreadable)) / len(grid.ranks) < SILENT_SHARE
    found = {rank: _one(rank, evidence, silence_speaks) for rank in grid.ranks}
    locked = [rank for rank, c in found.items() if c.kind == "locked"]
    if len(locked) > max(1, LOCKED_SHARE * len(seen)):
        found |= {rank: _standing(rank, evidence.dumps[rank], evidence) for rank in locked}
    return _crowd(found)


def _one(rank: int, evidence: Evidence, silence_speaks: bool) -> Condition:
    place, dump = evidence.grid[rank], evidence.dumps.get(rank)
    frames = dump.main.frames if dump else ()
    if place.state in ("gone", "Z", "X"):
        return Condition(rank=rank, kind="gone", text="its process is gone", frames=frames)
    if place.state in ("T", "t"):
        return Condition(rank=rank, kind="stopped", text="its process is stopped (state T)", frames=frames)
    if dump is None:
        if rank in evidence.recordings:
            idle = evidence.recordings[rank].waiting is None
            text = "outside any collective" if idle else "only its Flight Recorder was dumped"
            return Condition(rank=rank, kind="busy" if idle else "waiting", text=text)
        if rank in evidence.unreadable:
            return Condition(rank=rank, kind="unreadable", text="its dump cannot be read")
        kind = "silent" if silence_speaks else "unknown"
        return Condition(rank=rank, kind=kind, text="there is no dump of it")
    if not frames and dump.cut:
        return Condition(rank=rank, kind="unreadable", text="its dump breaks off before its main thread")
    if not frames:
        kind = "silent" if silence_speaks else "unknown"
        return Condition(rank=rank, kind=kind, text=f"its stack could not be taken ({dump.error or 'empty dump'})")
    if dump.error and not FOLLOWS.search(dump.error) and "py-spy" not in dump.error:
        return Condition(rank=rank, kind="crashed", text=f"raised {dump.error[:160]}", frames=frames)
    holder = dump.held_by
    if holder is not None:
        text = f"its thread {holder.name or '(unnamed)'} holds Python's global lock in {holder.frames[0]}"
        return Condition(rank=rank, kind="locked", text=text, frames=frames)
    return _standing(rank, dump, evidence)


def _standing(rank: int, dump: Dump, evidence: Evidence) -> Condition:
    """By its stack alone."""
    frames = dump.main.frames
    before = evidence.earlier.get(rank)
    moves = before is not None and bool(before.main.frames) and keys(before.main.frames) != keys(frames)
    wait = wait_of(frames)
    if wait is not None:
        return Condition(rank=rank, kind="waiting", text=f"in {wait.op}", frames=frames, wait=wait, moves=moves)
    soft = soft_wait(frames)
    kind = "soft" if soft else "busy"
    return Condition(rank=rank, kind=kind, text=activity(frames), frames=frames, wait=soft, moves=moves)


def _crowd(found: dict[int, Condition]) -> dict[int, Condition]:
    """Where most ranks stand at the very same line outside communication, they wait there for their card."""
    stands: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, c in found.items():
        if c.kind in ("busy", "soft") and c.frames:
            stands[keys(c.frames)].append(rank)
    heard = sum(1 for c in found.values() if c.frames)
    for ranks in stands.values():
        if len(ranks) > CROWD * heard and heard > 1:
            for rank in ranks:
                c = found[rank]
                wait = c.wait or Wait(op="device", site=c.frames[0], axis="")
                found[rank] = Condition(rank=rank, kind="waiting", text="waits", frames=c.frames, wait=wait)
    return found


def keys(frames: tuple[Frame, ...]) -> tuple[tuple[str, str, int], ...]:
    """What makes two stacks equal, whichever tool wrote them."""
    return tuple(frame.key for frame in frames)


def activity(frames: tuple[Frame, ...]) -> str:
    """What a rank that does not wait is doing, in words, by the names nearest to the innermost frame."""
    names = [f"{f.function} {f.file}" for f in frames[:8]]
    return next((text for name in names for text, pattern in ACTIVITY if pattern.search(name)), "outside communication")


def majority_step(evidence: Evidence) -> int:
    """The iteration that most ranks are in, by their heartbeats; -1 where nobody wrote one."""
    steps = Counter(p.progress for p in evidence.grid.places if p.step >= 0)
    return steps.most_common(1)[0][0] if steps else -1
