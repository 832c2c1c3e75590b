"""Whoever is to blame for a hang is named, from dumps of any tool, also bad ones, and from any
files.
"""

import json
from dataclasses import replace
from random import Random

import pytest
from dumps import pyspy_text, topology, write_all
from job import ATTENTION, DATA, DP_SUM, GRID, ROOT, STEP, Stack, c10d
from plants import PLANTS, data_loader, write
from support import small_plan

from trilane.cli.app import main
from trilane.workspace.heartbeat import Heartbeat
from trilane_diagnose.capture import write_topology
from trilane_diagnose.hang import diagnose_hang
from trilane_diagnose.suspects import OPEN

BEFORE: Stack = (("train", "megatron/training.py", 915), *ROOT[1:])
LOSS: Stack = (
    *c10d("broadcast"),
    ("_aggregate_total_loss", "deepspeed/runtime/pipe/engine.py", 540),
    *STEP,
)
LAUNCHER: Stack = (("_invoke_run", "torch/distributed/elastic/agent/server/api.py", 1),)
WORKER: Stack = (("_worker_loop", "torch/utils/data/_utils/worker.py", 240), *BEFORE)


@pytest.mark.parametrize("kind", PLANTS)
def test_the_culprit_among_384_ranks_is_named(kind: str, tmp_path):
    scene = PLANTS[kind](Random(kind))
    write(tmp_path / "dumps", scene)
    verdict = diagnose_hang(tmp_path / "dumps")
    assert scene.guilty == set(verdict.suspects), verdict.paragraph
    assert set(verdict.nodes) >= {GRID[rank].node for rank in scene.guilty}


@pytest.mark.parametrize("known", [True, False])
def test_two_of_eight_ranks_are_still_in_the_broadcast_of_the_loss(known: bool, tmp_path):
    """The BLOOM chronicles' node 0 of TP 8, PP 10, DP 4: six wait in train at line 915, two never
    left train_step.
    """
    write_all(tmp_path, {rank: LOSS if rank in (3, 6) else BEFORE for rank in range(8)}, "text")
    if known:
        topology(tmp_path, 8, 10, 4)
    verdict = diagnose_hang(tmp_path)
    assert verdict.exclude == "", "nobody told the nodes' names"
    assert verdict.suspects == ((3, 6) if known else ()) and (known or OPEN in verdict.paragraph)
    assert [len(group.ranks) for group in verdict.groups if group.frames] == [6, 2]


@pytest.mark.parametrize("style", ["text", "faults"])
def test_a_half_written_dump_is_used_as_far_as_it_goes(style: str, tmp_path):
    """Where no frame is left, the late rank may be this one, or none."""
    scene = data_loader(Random(7))
    scene.style = style
    folder = tmp_path / "dumps"
    write(folder, scene)
    (culprit,) = scene.guilty
    path = folder / f"rank_{culprit}.txt"
    text = path.read_text()
    path.write_text(text[: text.index("get_batch") + 20])
    assert diagnose_hang(folder).suspects == (culprit,)
    path.write_text(text[:40])
    verdict = diagnose_hang(folder)
    assert verdict.suspects == ()
    assert any(f"ranks {culprit} cannot be read" in note for note in verdict.notes)


def test_dumps_of_which_none_can_be_read_are_no_evidence(tmp_path, capsys):
    (tmp_path / "rank0.pickle").write_bytes(b"\x80junk")
    (tmp_path / "rank_1.json").write_text("half")
    (tmp_path / "hosts.txt").write_text("-" * 16 + "\nnode1\n" + pyspy_text(LOSS))
    assert main(["debug", "hang", str(tmp_path)]) == 2
    assert "holds no dump (py-spy, faulthandler, Flight Recorder)" in capsys.readouterr().err


IN_C = (
    "pthread_cond_wait (libc.so.6)",
    "c10d::Work::wait (csrc/Work.cpp:91)",
    "0x7fa84704524a (libc.so.6)",
)


def test_frames_of_c_are_no_stack(tmp_path):
    """`py-spy dump --native`, as the BLOOM chronicles ask for."""
    stacks = dict.fromkeys(range(4), DP_SUM.stack) | dict.fromkeys(range(4, 8), ATTENTION.stack)
    for rank, stack in (stacks | {5: DATA.stack}).items():
        (tmp_path / f"rank_{rank}.txt").write_text(pyspy_text(stack, native=IN_C))
    topology(tmp_path, 4, 1, 2)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (5,) and len(verdict.groups) == 3


@pytest.mark.parametrize(("moments", "named"), [(("t1", "t2"), ()), (("t2", "t1"), (5,))])
def test_of_two_moments_the_last_counts(moments: tuple[str, str], named: tuple[int, ...], tmp_path):
    summing = dict.fromkeys(range(8), DP_SUM.stack)
    for moment, stacks in zip(moments, (summing | {5: DATA.stack}, summing), strict=True):
        write_all(tmp_path / moment, stacks)
        topology(tmp_path / moment, 1, 1, 8)
    assert diagnose_hang(tmp_path).suspects == named


def test_nodes_are_named_after_their_files(tmp_path, capsys):
    """16 ranks on four nodes, with launchers and workers, and no topology.json."""
    for node, host in enumerate(("r7i1n0", "r8i0n3", "r10i2n5", "r10i2n7")):
        stacks = [DATA.stack if (node, local) == (1, 2) else LOSS for local in range(4)]
        dumps = [pyspy_text(LAUNCHER, 101), pyspy_text(WORKER, 102)]
        dumps += [pyspy_text(stack, 100 + 10 * local) for local, stack in enumerate(stacks)]
        (tmp_path / f"trace-{host}{'-gpu1.5' * node}.out").write_text("".join(dumps))
    assert main(f"debug hang {tmp_path} --tp=4 --pp=2 --dp=2 --json".split()) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert (verdict["suspects"], verdict["exclude"]) == ([6], "--exclude=r8i0n3")


@pytest.mark.parametrize("form", ["pids", "[rank{}]\n", "===== rank {} =====\n", "rank {}:\n"])
def test_a_pid_is_no_rank_and_the_end_of_a_files_name_no_node(form: str, tmp_path):
    """`pyspy_PID.txt`, or one `pyspy.log` that names the rank before each dump."""
    for rank in (2, 0, 3, 1):
        text = pyspy_text(DATA.stack if rank == 2 else LOSS, 5000 + rank)
        name = "pyspy.log"
        if form == "pids":
            name = f"pyspy_{5000 + rank}.txt"
        with (tmp_path / name).open("a") as file:
            file.write(form.format(rank) * (form != "pids") + text)
    verdict = diagnose_hang(tmp_path)
    assert (verdict.suspects, len(verdict.grid.ranks), verdict.exclude) == ((2,), 4, "")
    assert "rank 2 (node 1 of 1)" in verdict.paragraph


def test_files_of_two_nodes_that_number_their_own_ranks_are_refused(tmp_path):
    for name in ("node0_rank0", "node1_rank0"):
        (tmp_path / f"{name}.txt").write_text(pyspy_text(LOSS))
    with pytest.raises(ValueError, match="rank 0 has other files"):
        diagnose_hang(tmp_path)


@pytest.mark.parametrize(("culprits", "exclude"), [((1,), "--exclude=a"), ((1, 9), "")])
def test_all_nodes_are_never_excluded(culprits: tuple[int, ...], exclude: str, tmp_path):
    """sbatch with every node of the job left out would wait for others."""
    stacks = dict.fromkeys(range(16), DP_SUM.stack) | dict.fromkeys(culprits, DATA.stack)
    write_all(tmp_path, stacks)
    plan = small_plan()
    nodes = replace(plan.cluster, gpus_per_node=8, max_nodes=2)
    plan = replace(plan, cluster=nodes, topology=replace(plan.topology, dp=16, gbs=32))
    beats = {}
    for rank in range(16):
        host = "ab"[rank // 8]
        beats[rank] = Heartbeat(rank=rank, host=host, step=4, phase="", time=1.0, pid=7)
    write_topology(tmp_path, plan, beats)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == culprits and verdict.exclude == exclude


@pytest.mark.parametrize(("stack", "exclude"), [(DATA.stack, "--exclude=a"), (LOSS, "")])
def test_by_the_order_of_names_no_node_is_excluded_unless_its_stack_shows_the_fault(
    stack: Stack, exclude: str, tmp_path
):
    for host in "ab":
        dumps = []
        for local in range(4):
            shown = stack if (host, local) == ("a", 2) else DP_SUM.stack
            dumps.append(pyspy_text(shown, 100 + local))
        (tmp_path / f"trace-{host}.out").write_text("\n".join(dumps))
    topology(tmp_path, 1, 1, 8, gpus_per_node=4)
    verdict = diagnose_hang(tmp_path)
    assert (verdict.suspects, verdict.exclude) == ((2,), exclude)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "-1"], "tp=-1: must be"),
        (["--tp", "99999", "--pp", "99999"], "tp x pp x dp=9999800001: must be at most 131072"),
    ],
)
def test_a_bad_call_is_one_line(arguments: list[str], message: str, tmp_path, capsys):
    assert main(["debug", "hang", str(tmp_path), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
