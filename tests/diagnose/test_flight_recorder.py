"""Flight Recorder dumps as NCCL leaves them: batches of sends and receives, groups with two numbers, missing files."""

import json
from pathlib import Path
from typing import Any

import pytest
from dumps import recording, topology

from trilane.diagnose.hang.flight_recorder import read_recording
from trilane.diagnose.hang.verdict import Verdict, diagnose_hang

DP = list(range(8))


def call(group: str, sequence: int, op: str, state: str = "completed", *, p2p: bool = False) -> dict[str, Any]:
    return {"group": group, "sequence": sequence, "op": op, "state": state, "p2p": p2p}


def batch(sequence: int, state: str, *ops: str) -> list[dict[str, Any]]:
    """What batch_isend_irecv leaves: only the entry that closes it is timed."""
    inside = [call("7", sequence, op, "scheduled", p2p=True) for op in ops]
    return [*inside, call("7", sequence, "coalesced", state, p2p=True)]


def test_of_a_pipeline_with_batched_sends_who_never_sent_is_named(tmp_path: Path) -> None:
    """megatron-core's default, batch_p2p_comm=True: rank 1 of 4 stages received, and sent nothing on."""
    calls = {
        0: batch(1, "completed", "send 0->1"),
        1: batch(1, "completed", "recv 1<-0"),
        2: [*batch(1, "completed", "recv 2<-1"), *batch(2, "started", "send 2->3", "recv 2<-1")],
        3: [*batch(1, "completed", "recv 3<-2"), *batch(2, "started", "recv 3<-2")],
    }
    for rank, made in calls.items():
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(recording(made, {"7": [0, 1, 2, 3]}))
    topology(tmp_path, 1, 4, 1)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (1,) and verdict.reasons[1] == "is waited for in recv 2<-1 number 2 of group 7"
    assert {g.ranks: g.waits_for for g in verdict.groups} == {(0, 1): (), (2, 3): (1, 2, 3)}


def test_what_is_only_scheduled_is_done_when_a_later_call_of_its_group_is() -> None:
    calls = [call("7", 1, "send 0->1", "scheduled", p2p=True), call("7", 1, "all_reduce"), call("7", 2, "all_reduce")]
    assert read_recording(recording(calls, {"7": [0, 1]})).waiting is None
    late = [*calls, call("7", 3, "all_reduce", "scheduled")]
    waiting = read_recording(recording(late, {"7": [0, 1]})).waiting
    assert waiting is not None and waiting.sequence == 3


def test_a_group_is_its_name_and_not_its_number_on_this_rank(tmp_path: Path) -> None:
    """TP 2 x DP 2. Rank 1 never entered its sum over "2", but five over "3", which is its own number 2."""
    tensor = [call("3", n, "all_reduce") for n in range(1, 6)]
    groups = {"0": [0, 1, 2, 3], "2": [1, 3], "3": [0, 1]}
    (tmp_path / "nccl_trace_rank_1").write_bytes(recording(tensor, groups))
    started = [call("2", 1, "reduce_scatter", "started")]
    (tmp_path / "nccl_trace_rank_3").write_bytes(recording(started, {**groups, "3": [2, 3]}))
    for rank in (0, 2):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(recording([], {"0": [0, 1, 2, 3]}))
    topology(tmp_path, 2, 1, 2)
    assert diagnose_hang(tmp_path).suspects == (1,)


def sums(folder: Path, name: str = "nccl_trace_rank_") -> None:
    """Eight replicas: all but rank 5 entered the second sum."""
    for rank in DP:
        calls = [call("1", 1, "all_reduce"), call("1", 2, "all_reduce", "started")][: 1 if rank == 5 else 2]
        (folder / f"{name}{rank}").write_bytes(recording(calls, {"1": DP}))
    topology(folder, 1, 1, 8)


def without(folder: Path, *ranks: int, cut: bool = False) -> Verdict:
    sums(folder)
    for rank in ranks:
        path = folder / f"nccl_trace_rank_{rank}"
        path.write_bytes(path.read_bytes()[:200]) if cut else path.unlink()
    return diagnose_hang(folder)


def test_who_is_proven_late_is_named_and_not_one_of_whom_there_is_no_dump(tmp_path: Path) -> None:
    verdict = without(tmp_path, 7)
    assert verdict.suspects == (5,) and "never entered all_reduce number 2" in verdict.reasons[5]


def test_a_recording_that_is_cut_speaks_against_nobody(tmp_path: Path) -> None:
    verdict = without(tmp_path, 7, cut=True)
    assert verdict.suspects == (5,) and {g.waits_for for g in verdict.groups} == {(5,), ()}


@pytest.mark.parametrize("cut", [True, False])
def test_of_ranks_without_a_dump_nothing_is_concluded_but_that_it_is_one_of_them(cut: bool, tmp_path: Path) -> None:
    verdict = without(tmp_path, 0, 2, 4, 5, 6, cut=cut)
    assert verdict.suspects == () and verdict.exclude == ""
    assert "among ranks 0, 2, 4-6," in verdict.paragraph


def test_ranks_outside_any_collective_that_hold_up_nobody_are_no_suspects(tmp_path: Path) -> None:
    for rank in DP:
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(recording([call("1", 1, "all_reduce")], {"1": DP}))
    assert diagnose_hang(tmp_path).suspects == ()


def test_a_rank_right_behind_the_prefix_is_read(tmp_path: Path) -> None:
    """torch writes TORCH_FR_DUMP_TEMP_FILE and the rank, with nothing between."""
    sums(tmp_path, "trace")
    (tmp_path / "trace").write_bytes((tmp_path / "trace1").read_bytes())
    (tmp_path / "trace7").write_bytes((tmp_path / "trace7").read_bytes()[:200])
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (5,) and "trace: the name holds no rank; ignored" in verdict.notes


@pytest.mark.parametrize(
    ("state", "retired", "backend", "waits"),
    [
        ("completed", False, "nccl", False),
        ("scheduled", True, "gloo", False),  # which only retires the entry
        ("scheduled", True, "nccl", True),  # the watchdog retires what it gives up
        ("scheduled", False, "nccl", True),
        ("started", False, "nccl", True),
        ("started", True, "nccl", True),
    ],
)
def test_a_call_that_has_started_and_not_completed_is_waited_for(
    state: str, retired: bool, backend: str, waits: bool
) -> None:
    values = json.loads(recording([call("1", 1, "all_reduce", state)], {"1": DP}, as_json=True))
    values["entries"][0] |= {"retired": retired, "profiling_name": f"{backend}:all_reduce"}
    assert (read_recording(json.dumps(values).encode()).waiting is not None) is waits


def test_a_rank_has_entered_what_its_status_or_its_latest_call_says() -> None:
    """The ring keeps the last 2,000 calls: what the status counts may be gone, and what is there may be newer."""
    calls = [call("1", 8, "all_reduce"), call("1", 7, "all_reduce")]
    values = json.loads(recording(calls, {"1": DP}, as_json=True))
    for last, entered in ((7, 8), (8, 8), (12, 12)):
        values["pg_status"]["0"]["last_enqueued_collective"] = last
        assert read_recording(json.dumps(values).encode()).entered == {"1": entered}


def test_who_entered_the_call_is_not_waited_for(tmp_path: Path) -> None:
    """Rank 5 alone has not: the others, whose last call is that one, hold up nobody."""
    sums(tmp_path)
    groups = {g.ranks: g.waits_for for g in diagnose_hang(tmp_path).groups}
    assert groups == {(0, 1, 2, 3, 4, 6, 7): (5,), (5,): ()}


def test_a_send_names_its_peer_by_its_place_in_the_group(tmp_path: Path) -> None:
    """Of the pipeline of ranks 1, 3, 5 and 7, "recv 2<-1" is rank 5's, from rank 3."""
    members, others = [1, 3, 5, 7], [0, 2, 4, 6]
    for rank in range(8):
        made = batch(1, "started", "recv 2<-1") if rank == 5 else []
        group = members if rank in members else others
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(recording(made, {"7": group}))
    topology(tmp_path, 2, 4, 1)
    assert {g.waits_for for g in diagnose_hang(tmp_path).groups if g.waits_for} == {(3,)}


def test_of_eight_ranks_the_one_in_a_later_call_is_odd_and_not_the_seven_that_are_late_for_it(tmp_path: Path) -> None:
    """Its own operation ended without the others, or it entered another one."""
    for rank in DP:
        number = 13 if rank == 2 else 12
        calls = [*(call("dp", n, "all_reduce") for n in range(8, number)), call("dp", number, "all_reduce", "started")]
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(recording(calls, {"dp": DP}))
    topology(tmp_path, 1, 1, 8)
    assert diagnose_hang(tmp_path).suspects == (2,)


@pytest.mark.parametrize("late", [[5], [0, 1, 2, 3, 4, 5, 6, 7]])
def test_what_a_gpu_has_only_queued_is_not_called_a_fault_of_the_network(late: list[int], tmp_path: Path) -> None:
    for rank in range(8):
        waits = call("dp", 4, "all_reduce", "scheduled" if rank in late else "started")
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(recording([waits], {"dp": list(range(8))}))
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and "suspect the network" not in verdict.paragraph
    assert "cannot be determined" in verdict.paragraph


def test_two_ranks_of_a_group_in_different_calls_are_both_named(tmp_path: Path) -> None:
    for rank in range(8):
        op = "reduce_scatter" if rank == 5 else "all_gather"
        made = [call("3", 9, op, "started")] if rank in (4, 5) else [call("3", 9, "all_gather")]
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(recording(made, {"3": [rank // 2 * 2, rank // 2 * 2 + 1]}))
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (4, 5) and verdict.first is None and verdict.exclude == ""
    assert all("which of them is wrong cannot be determined" in reason for reason in verdict.reasons.values())


def test_a_root_that_has_gone_on_is_not_named(tmp_path: Path) -> None:
    """Its part of a broadcast is done once it has sent; the others have all begun to receive."""
    for rank in DP:
        made = [call("1", 9, "broadcast", "started" if rank else "completed"), call("1", 10, "all_reduce", "started")]
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(recording(made if rank == 0 else made[:1], {"1": DP}))
    assert diagnose_hang(tmp_path).suspects == ()


def test_sends_do_not_count_as_collectives_that_a_rank_entered(tmp_path: Path) -> None:
    """The status counts both, each by its own numbers: rank 1 has queued 60 sends and receives, and 4 collectives."""
    for rank in range(4):
        sent = [part for number in range(1, 61) for part in batch(number, "completed", "send 0->1")]
        made = [call("7", 4, "all_reduce"), *sent] + [call("7", 5, "all_reduce", "started")] * (rank != 1)
        values = json.loads(recording(made, {"7": [0, 1, 2, 3]}, as_json=True))
        values["pg_status"]["0"]["last_enqueued_collective"] = 60 if rank == 1 else 5
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(values))
    assert diagnose_hang(tmp_path).suspects == (1,)


def test_json_that_torch_writes_has_the_status_as_text() -> None:
    values = json.loads(recording([call("1", 7, "all_reduce")], {"1": DP}, as_json=True))
    values["pg_status"] = {"0": {name: str(number) for name, number in values["pg_status"]["0"].items()}}
    assert read_recording(json.dumps(values).encode()).entered == {"1": 7}


def test_what_differs_between_the_ranks_of_a_call_is_named(tmp_path: Path) -> None:
    for rank in DP:
        values = json.loads(recording([call("1", 8, "_all_gather_base", "started")], {"1": DP}, as_json=True))
        values["entries"][0] |= {"input_dtypes": ["Float" if rank == 2 else "BFloat16"], "output_sizes": [[32768]]}
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(values))
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (2,) and "_all_gather_base of [[4096]] (Float) where" in verdict.reasons[2]


@pytest.mark.parametrize("op", ["all_to_all_v_single", "all_gather", "gather"])
def test_sizes_that_each_rank_may_choose_accuse_nobody(op: str, tmp_path: Path) -> None:
    for rank in DP:
        made = [{**call("1", 8, op, "started"), "sizes": [[100 + rank]]}]
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(recording(made, {"1": DP}))
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and "same collective" in verdict.paragraph


def test_a_send_and_its_receive_are_no_mismatch(tmp_path: Path) -> None:
    for rank, op in enumerate(("send 0->1", "recv 1<-0")):
        (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(recording(batch(1, "started", op), {"7": [0, 1]}))
    assert diagnose_hang(tmp_path).suspects == ()


def test_a_rank_whose_ring_has_lost_the_group_is_not_said_to_have_stayed_away(tmp_path: Path) -> None:
    """Of four ranks, rank 3 never came; the last calls of rank 2 are those of another group."""
    for rank in range(4):
        made = (
            [call("2", n, "all_reduce") for n in range(50, 54)]
            if rank == 2
            else [call("1", 8 - (rank == 3), "all_reduce")]
        )
        made[-1]["state"] = "started" if rank < 2 else "completed"
        values = json.loads(recording(made, {"1": [0, 1, 2, 3], "2": [2]}, as_json=True))
        values["entries"] = [entry | {"record_id": number + 900} for number, entry in enumerate(values["entries"])]
        del values["pg_status"]  # torch 2.3
        (tmp_path / f"nccl_trace_rank_{rank}").write_text(json.dumps(values))
    assert diagnose_hang(tmp_path).suspects == (3,)


def test_the_status_counts_where_no_call_is_left() -> None:
    """torch may dump the calls alone that have not ended; of none the JSON has no list."""
    values = json.loads(recording([call("1", 7, "all_reduce")], {"1": DP}, as_json=True))
    del values["entries"]
    assert read_recording(json.dumps(values).encode()).entered == {"1": 7}
