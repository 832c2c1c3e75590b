"""Flight Recorder dumps as NCCL leaves them: batches of sends and receives, groups with two
numbers, missing files.
"""

import json
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


def judged(folder: Path, calls: dict[int, Calls], groups: dict[str, list[int]]) -> Verdict:
    """The verdict on recordings."""
    for rank, own in calls.items():
        (folder / f"nccl_trace_rank_{rank}").write_bytes(recording(own, groups))
    return diagnose_hang(folder)


SUM = [call("1", 1), call("1", 2, state="started")]
LATE = {rank: SUM for rank in DP} | {5: SUM[:1]}  # all but rank 5 entered the second sum
# megatron-core's default, batch_p2p_comm=True: rank 1 of 4 stages received, and sent nothing on
NEVER_SENT = {
    0: batch(1, "completed", "send 0->1"),
    1: batch(1, "completed", "recv 1<-0"),
    2: batch(1, "completed", "recv 2<-1") + batch(2, "started", "send 2->3", "recv 2<-1"),
    3: batch(1, "completed", "recv 3<-2") + batch(2, "started", "recv 3<-2"),
}
AHEAD = [call("1", 9, "broadcast"), call("1", 10, state="started")]
ROOT = {rank: [call("1", 9, "broadcast", "started")] for rank in DP} | {0: AHEAD}
PAIR = {0: batch(1, "started", "send 0->1"), 1: batch(1, "started", "recv 1<-0")}


def sized(op: str, sizes: dict[int, int]) -> dict[int, Calls]:
    """A started call of each rank, with sizes."""
    return {r: [call("1", 8, op, "started", sizes=[[size]])] for r, size in sizes.items()}


SCENES: dict[str, tuple[dict[int, Calls], dict[str, list[int]], tuple[int, ...]]] = {
    # recordings, groups, who is named
    "a rank that never entered a sum": (LATE, {"1": DP}, (5,)),
    "a stage that never sent": (NEVER_SENT, {"7": [0, 1, 2, 3]}, (1,)),
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
def test_who_is_late_is_named_and_no_other(name: str, tmp_path):
    calls, groups, named = SCENES[name]
    verdict = judged(tmp_path, calls, groups)
    sure = tuple(rank for rank, reason in verdict.reasons.items() if OPEN not in reason)
    assert verdict.suspects == sure == named
    assert named or OPEN in verdict.paragraph


def test_of_ranks_without_a_dump_nothing_is_concluded_but_that_it_is_one_of_them(
    tmp_path,
):
    judged(tmp_path, LATE, {"1": DP})
    for rank in (0, 2, 4, 5, 6):
        (tmp_path / f"nccl_trace_rank_{rank}").unlink()
    verdict = diagnose_hang(tmp_path)
    assert (verdict.suspects, verdict.exclude) == ((), "")
    assert "ranks 0, 2, 4-6 " in verdict.summary()


@pytest.mark.parametrize(
    ("state", "retired", "backend", "waits"),
    [
        ("completed", False, "nccl", False),
        ("scheduled", True, "gloo", False),  # which only retires the entry
        ("scheduled", True, "nccl", True),  # the watchdog retires what it gives up
        ("started", True, "gloo", True),
    ],
)
def test_a_call_that_has_not_completed_is_waited_for(
    state: str, retired: bool, backend: str, waits: bool
):
    values = json.loads(recording([call("1", 1, state=state)], {"1": DP}, as_json=True))
    values["entries"][0] |= {"retired": retired, "profiling_name": f"{backend}:all_reduce"}
    assert (read_recording(json.dumps(values).encode()).waiting is not None) is waits
