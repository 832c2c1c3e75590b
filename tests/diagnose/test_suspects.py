"""The rules by which suspects of a hang are found, each at its edge, with a few ranks."""

from pathlib import Path

import pytest
from dumps import pyspy_json, topology, write_all
from job import ATTENTION, DATA, DP_SUM, ROOT, SPREAD, STEP, Stack, c10d

from trilane.diagnose.hang.verdict import diagnose_hang


def work(number: int) -> Stack:
    """A place outside communication, another one for each number."""
    return (("compute", f"kernel{number}.py", 10), *STEP)


@pytest.mark.parametrize(("busy", "named"), [((4, 5), (0, 4, 5)), ((4, 5, 6), (0,))])
def test_who_holds_up_half_as_many_as_the_worst_is_named_too(
    busy: tuple[int, ...], named: tuple[int, ...], tmp_path: Path
) -> None:
    """TP 4, two replicas: 0 holds up three; 4 and 5 hold up two, of the other group; or 4, 5 and 6 a single one."""
    stacks = {r: ATTENTION.stack for r in range(8)} | {r: work(r) for r in (0, *busy)}
    write_all(tmp_path, stacks)
    topology(tmp_path, 4, 1, 2)
    assert tuple(sorted(diagnose_hang(tmp_path).suspects)) == named


@pytest.mark.parametrize(("ranks", "holders", "named"), [(4, (1,), (1,)), (8, (5,), (5,)), (8, (5, 6), ())])
def test_a_lock_that_one_rank_holds_elsewhere_is_a_cause_and_one_that_many_hold_is_a_habit(
    ranks: int, holders: tuple[int, ...], named: tuple[int, ...], tmp_path: Path
) -> None:
    """A thread of a profiler holds the global lock wherever it is looked at."""
    holder = (("match", "re.py", 190), ("scan", "monitor.py", 12), ("_bootstrap", "threading.py", 973))
    for rank in range(ranks):
        is_alone = rank in holders and len(holders) == 1
        stack = ATTENTION.stack if is_alone else DP_SUM.stack
        text = pyspy_json(stack, 100 + rank, holder if rank in holders else None)
        (tmp_path / f"rank_{rank}.json").write_text(text)
    topology(tmp_path, 1, 1, ranks)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == named and all("lock" in reason for reason in verdict.reasons.values())


def test_a_lock_held_for_an_instant_hides_no_rank_that_others_wait_for(tmp_path: Path) -> None:
    """Any thread that runs while its main thread waits holds the global lock for that instant."""
    holder = (("check_internal_messages", "wandb/sdk/wandb_run.py", 300), ("_bootstrap", "threading.py", 973))
    loading = (("_try_get_data", "torch/utils/data/dataloader.py", 1291), *STEP)
    for rank in range(16):
        stack = loading if rank == 9 else DP_SUM.stack
        text = pyspy_json(stack, 100 + rank, holder if rank == 0 else None)
        (tmp_path / f"rank_{rank}.json").write_text(text)
    topology(tmp_path, 1, 1, 16)
    assert diagnose_hang(tmp_path).suspects == (9,)


@pytest.mark.parametrize(
    ("inner", "crowd"),
    [
        (("read", "megatron/core/datasets/indexed_dataset.py", 430), (0, 2, 3, 4, 5, 7)),
        (("_save", "torch/serialization.py", 1312), (0, 1, 2, 4, 5, 6, 7)),
        (("recv", "multiprocessing/connection.py", 250), (0, 1, 2, 3, 4)),
    ],
)
def test_most_ranks_in_the_data_loader_a_save_or_a_compiler_are_to_blame_and_no_crowd_at_its_cards(
    inner: tuple[str, str, int], crowd: tuple[int, ...], tmp_path: Path
) -> None:
    cache = (("get", "torch/_inductor/remote_cache.py", 160),)
    stacks = dict.fromkeys(range(8), DP_SUM.stack) | dict.fromkeys(crowd, (inner, *cache, *STEP))
    write_all(tmp_path, stacks)
    topology(tmp_path, 1, 1, 8)
    assert tuple(sorted(diagnose_hang(tmp_path).suspects)) == crowd


def test_a_rank_alone_in_its_dump_is_busy_and_no_crowd_that_waits_for_its_card(tmp_path: Path) -> None:
    """One dump of eight: nothing is known of the others, and its own stack is no proof that it waits."""
    write_all(tmp_path, {3: work(1)})
    topology(tmp_path, 1, 1, 8)
    (group,) = (g for g in diagnose_hang(tmp_path).groups if g.frames)
    assert group.kind == "busy"


def test_most_ranks_at_one_line_wait_for_their_cards_and_the_one_elsewhere_is_named(tmp_path: Path) -> None:
    write_all(tmp_path, {rank: work(7 if rank == 2 else 1) for rank in range(8)})
    topology(tmp_path, 1, 1, 8)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (2,) and {g.kind for g in verdict.groups} == {"busy", "waiting"}


@pytest.mark.parametrize(("dumped", "named"), [(5, (5, 6, 7)), (4, ()), (3, ())])
def test_missing_dumps_count_where_most_ranks_have_one(dumped: int, named: tuple[int, ...], tmp_path: Path) -> None:
    """Half of them were perhaps not asked."""
    write_all(tmp_path, dict.fromkeys(range(dumped), DP_SUM.stack))
    topology(tmp_path, 1, 1, 8)
    assert diagnose_hang(tmp_path).suspects == named


@pytest.mark.parametrize(("culprits", "exclude"), [((1,), "--exclude=a"), ((1, 9), "")])
def test_all_nodes_are_never_excluded(culprits: tuple[int, ...], exclude: str, tmp_path: Path) -> None:
    """sbatch with every node of the job left out would wait for others, if there are any."""
    write_all(tmp_path, {rank: DATA.stack if rank in culprits else DP_SUM.stack for rank in range(16)})
    ranks = [{"rank": rank, "host": "ab"[rank // 8]} for rank in range(16)]
    topology(tmp_path, 1, 1, 16, ranks=ranks)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == culprits and verdict.exclude == exclude


@pytest.mark.parametrize(("behind", "usual"), [((2,), 7), ((2, 3, 4), 7)])
def test_who_is_an_iteration_behind_is_named_by_the_heartbeats(
    behind: tuple[int, ...], usual: int, tmp_path: Path
) -> None:
    """All wait in the same call of the same line; eight replicas, a minority of them an iteration behind."""
    write_all(tmp_path, dict.fromkeys(range(8), DP_SUM.stack))
    ranks = [{"rank": rank, "step": usual - (rank in behind)} for rank in range(8)]
    topology(tmp_path, 1, 1, 8, ranks=ranks)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == behind
    assert verdict.reasons[2] == f"is in iteration {usual - 1} while most are in {usual}"


def test_of_two_that_wait_in_each_others_way_both_are_named(tmp_path: Path) -> None:
    """Two replicas sum two buckets in a row: one entered the first, or the other left it out."""
    caller = ("step", "engine.py")
    stacks = {
        rank: (*c10d("all_reduce"), (f"bucket{rank}", "buckets.py", 5), (*caller, line), *ROOT)
        for rank, line in ((0, 120), (1, 110))
    }
    write_all(tmp_path, stacks)
    topology(tmp_path, 1, 1, 2)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (0, 1) and "cannot be determined" in verdict.reasons[0]


def test_half_of_the_ranks_is_no_majority_by_which_others_are_behind(tmp_path: Path) -> None:
    """TP 4, two replicas, the second one an iteration behind: its rank in another collective is the odd one."""
    write_all(tmp_path, dict.fromkeys(range(8), ATTENTION.stack) | {4: SPREAD.stack})
    topology(tmp_path, 4, 1, 2, ranks=[{"rank": rank, "step": 7 if rank < 4 else 6} for rank in range(8)])
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (4,) and "while most are in" not in verdict.reasons[4]


def test_a_rank_of_unknown_progress_is_taken_to_be_with_the_others(tmp_path: Path) -> None:
    """Its heartbeat could not be read."""
    write_all(tmp_path, dict.fromkeys(range(4), DP_SUM.stack))
    topology(tmp_path, 1, 1, 4, ranks=[{"rank": rank, **({} if rank == 2 else {"step": 5})} for rank in range(4)])
    assert diagnose_hang(tmp_path).suspects == ()


def test_of_two_groups_the_wait_is_over_the_one_whose_member_is_not_ahead(tmp_path: Path) -> None:
    """TP 2 x DP 2, a collective of no known name: rank 1 and 3 are an iteration further, so rank 0 waits for rank 2."""
    waits = (*c10d("all_reduce"), ("custom", "own.py", 5), *STEP)
    write_all(tmp_path, {rank: work(rank) for rank in (1, 2, 3)} | {0: waits})
    topology(tmp_path, 2, 1, 2, ranks=[{"rank": rank, "step": 6 if rank % 2 else 5} for rank in range(4)])
    assert diagnose_hang(tmp_path).suspects == (2,)
