"""Flight Recorder dumps as NCCL leaves them: batches of sends and receives, groups with two
numbers, missing files.
"""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dumps import recording

from trilane_diagnose.flight_recorder import read_recording
from trilane_diagnose.hang import Verdict, diagnose_hang
from trilane_diagnose.suspects import OPEN

DP = list(range(8))
Calls = list[dict[str, Any]]


def call(
    group: str, sequence: int, op: str = "all_reduce", state: str = "completed", **more: Any
) -> dict[str, Any]:
    return {"group": group, "sequence": sequence, "op": op, "state": state, **more}


def batch(sequence: int, state: str, *ops: str) -> Calls:
    """What batch_isend_irecv leaves: only the entry that closes it is timed."""
    inside = [call("7", sequence, op, "scheduled", p2p=True) for op in ops]
    return [*inside, call("7", sequence, "coalesced", state, p2p=True)]


def judged(
    folder: Path,
    made: dict[int, Calls],
    groups: Any,
    change: Callable[[int, Any], Any] | None = None,
) -> Verdict:
    """The verdict on recordings; `groups` are those of each rank, or of all."""
    for rank, calls in made.items():
        own = groups[rank] if isinstance(groups, list) else groups
        data = recording(calls, own, as_json=change is not None)
        if change is not None:
            data = json.dumps(change(rank, json.loads(data))).encode()
        (folder / f"nccl_trace_rank_{rank}").write_bytes(data)
    return diagnose_hang(folder)


def sure(verdict: Verdict) -> tuple[int, ...]:
    return tuple(rank for rank, reason in verdict.reasons.items() if OPEN not in reason)


SUM = [call("1", 1), call("1", 2, state="started")]
LATE = {rank: SUM for rank in DP} | {5: SUM[:1]}  # all but rank 5 entered the second sum
# megatron-core's default, batch_p2p_comm=True: rank 1 of 4 stages received, and sent nothing on
NEVER_SENT = {
    0: batch(1, "completed", "send 0->1"),
    1: batch(1, "completed", "recv 1<-0"),
    2: batch(1, "completed", "recv 2<-1") + batch(2, "started", "send 2->3", "recv 2<-1"),
    3: batch(1, "completed", "recv 3<-2") + batch(2, "started", "recv 3<-2"),
}
# TP 2 x DP 2: rank 1 never entered its sum over "2", but five over "3", which is its own number 2
NUMBERED = {
    0: [],
    1: [call("3", n) for n in range(1, 6)],
    2: [],
    3: [call("2", 1, "reduce_scatter", "started")],
}
NAMES = [
    {"0": DP[:4]},
    {"0": DP[:4], "2": [1, 3], "3": [0, 1]},
    {"0": DP[:4], "2": [1, 3], "3": [2, 3]},
    {"0": DP[:4], "2": [1, 3], "3": [2, 3]},
]
AHEAD = [call("1", 9, "broadcast"), call("1", 10, state="started")]
ROOT = {rank: [call("1", 9, "broadcast", "started")] for rank in DP} | {0: AHEAD}
PAIR = {0: batch(1, "started", "send 0->1"), 1: batch(1, "started", "recv 1<-0")}


def sized(op: str, sizes: dict[int, int]) -> dict[int, Calls]:
    """A started call of each rank, with sizes."""
    return {r: [call("1", 8, op, "started", sizes=[[size]])] for r, size in sizes.items()}


SCENES: dict[str, tuple[dict[int, Calls], Any, tuple[int, ...]]] = {
    # recordings, groups, who is named
    "a rank that never entered a sum": (LATE, {"1": DP}, (5,)),
    "a stage that never sent": (NEVER_SENT, {"7": [0, 1, 2, 3]}, (1,)),
    "a group is its name and not its number on this rank": (NUMBERED, NAMES, (1,)),
    "ranks outside any collective that hold up nobody": (
        {rank: [call("1", 1)] for rank in DP},
        {"1": DP},
        (),
    ),
    "a root that has gone on": (ROOT, {"1": DP}, ()),
    "a send and its receive": (PAIR, {"7": [0, 1]}, ()),
    "sizes that each rank may choose": (
        sized("all_gather", {rank: 100 + rank for rank in DP}),
        {"1": DP},
        (),
    ),
    "other sizes of a sum": (
        sized("all_reduce", {rank: 101 if rank == 2 else 100 for rank in DP}),
        {"1": DP},
        (2,),
    ),
}


@pytest.mark.parametrize("name", SCENES)
def test_who_is_late_is_named_and_no_other(name: str, tmp_path: Path) -> None:
    made, groups, named = SCENES[name]
    verdict = judged(tmp_path, made, groups)
    assert verdict.suspects == sure(verdict) == named
    assert named or OPEN in verdict.paragraph


@pytest.mark.parametrize("cut", [True, False])
def test_of_ranks_without_a_dump_nothing_is_concluded_but_that_it_is_one_of_them(
    cut: bool, tmp_path: Path
) -> None:
    judged(tmp_path, LATE, {"1": DP})
    for path in [tmp_path / f"nccl_trace_rank_{rank}" for rank in (0, 2, 4, 5, 6)]:
        path.write_bytes(path.read_bytes()[:200]) if cut else path.unlink()
    verdict = diagnose_hang(tmp_path)
    assert (
        verdict.suspects == () and verdict.exclude == "" and "ranks 0, 2, 4-6 " in verdict.summary()
    )


@pytest.mark.parametrize(
    ("state", "retired", "backend", "waits"),
    [
        ("completed", False, "nccl", False),
        ("scheduled", True, "gloo", False),  # which only retires the entry
        ("scheduled", True, "nccl", True),  # the watchdog retires what it gives up
        ("scheduled", False, "nccl", True),
        ("started", True, "nccl", True),
        ("started", True, "gloo", True),
    ],
)
def test_a_call_that_has_not_completed_is_waited_for(
    state: str, retired: bool, backend: str, waits: bool
) -> None:
    values = json.loads(recording([call("1", 1, state=state)], {"1": DP}, as_json=True))
    values["entries"][0] |= {"retired": retired, "profiling_name": f"{backend}:all_reduce"}
    assert (read_recording(json.dumps(values).encode()).waiting is not None) is waits


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch canary",)


HOSTILE = {
    "runs code": pickle.dumps({"entries": Evil()}),
    "names a class": pickle.dumps({"entries": Path("x")}),
    "asks for memory by its memo's index": b"\x80\x02}r\xff\xff\xff\x7f.",
    "asks for memory by a length": b"\x80\x05\x96" + (1 << 40).to_bytes(8, "little") + b"x.",
    "a key that is hashed for ever": b"\x80\x02}" + b")" + b"q\x00h\x00\x86" * 60 + b"Ns.",
    "deep lists": b"\x80\x02" + b"](" * 100_000,
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_pickle_is_refused_in_no_time_and_memory(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no Flight Recorder dump, or truncated"):
        read_recording(data)
    (tmp_path / "nccl_trace_rank_0").write_bytes(
        recording([call("dp", 1, state="started")], {"dp": [0, 1]})
    )
    (tmp_path / "nccl_trace_rank_1").write_bytes(data)
    assert any(
        "nccl_trace_rank_1: no Flight Recorder dump" in note
        for note in diagnose_hang(tmp_path).notes
    )
    assert not (tmp_path / "canary").exists() and not Path("canary").exists()
