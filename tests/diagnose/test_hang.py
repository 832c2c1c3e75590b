"""Whoever is to blame for a hang is named, from dumps of any tool, also bad ones, and from any
files.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from dumps import VALUES, faulthandler_text, pyspy_text, topology, write_all
from job import ATTENTION, DATA, DP_SUM, GRID, ROOT, STEP, Stack, c10d
from plants import PLANTS, data_loader, write
from support import REPOSITORY, small_plan

from trilane.cli.app import main
from trilane.workspace.heartbeat import Heartbeat
from trilane_diagnose.capture import write_topology
from trilane_diagnose.hang import diagnose_hang
from trilane_diagnose.stacks import read_faults
from trilane_diagnose.suspects import OPEN

BEFORE: Stack = (("train", "megatron/training.py", 915), *ROOT[1:])
LOSS: Stack = (
    *c10d("broadcast"),
    ("_aggregate_total_loss", "deepspeed/runtime/pipe/engine.py", 540),
    *STEP,
)
ITEM: Stack = (("log_loss", "train.py", 77), *STEP)
LAUNCHER: Stack = (("_invoke_run", "torch/distributed/elastic/agent/server/api.py", 1),)
HOLDER: Stack = (
    ("match", "re.py", 190),
    ("scan", "monitor.py", 12),
    ("_bootstrap", "threading.py", 973),
)
EIGHT = dict.fromkeys(range(8), DP_SUM.stack)


@pytest.mark.parametrize("kind", PLANTS)
def test_the_culprit_among_384_ranks_is_named(kind: str, tmp_path: Path) -> None:
    scene = PLANTS[kind](Random(kind))
    write(tmp_path / "dumps", scene)
    verdict = diagnose_hang(tmp_path / "dumps")
    assert scene.guilty == set(verdict.suspects), verdict.paragraph
    assert set(verdict.nodes) >= {GRID[rank].node for rank in scene.guilty}


def test_384_dumps_are_judged_within_10_s_and_500_mb(tmp_path: Path) -> None:
    """In a process of its own, so that its memory is its own; 10 s of processor time are eight
    times what it takes.
    """
    write(tmp_path / "dumps", data_loader(Random(1)))
    code = "import sys; from trilane.cli.app import main; main(sys.argv[1:])\n"
    # getrusage(2) would count what this process holds: a child has it for a moment, until it
    # begins.
    code += "import time; peak = next(x.split()[1] for x in open('/proc/self/status') if x.startswith('VmHWM'))\n"
    code += "print(peak, time.process_time(), file=sys.stderr)"
    command = [sys.executable, "-c", code, "debug", "hang", str(tmp_path / "dumps"), "--json"]
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "lib")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    peak, seconds = map(float, done.stderr.split())
    assert seconds < 10 and peak * 1024 < 500e6
    assert {"groups", "waiting_for", "suspects", "nodes", "exclude"} <= json.loads(
        done.stdout
    ).keys()


@pytest.mark.parametrize("known", [True, False])
def test_two_of_eight_ranks_are_still_in_the_broadcast_of_the_loss(
    known: bool, tmp_path: Path
) -> None:
    """The BLOOM chronicles' node 0 of TP 8, PP 10, DP 4: six wait in train at line 915, two never
    left train_step.
    """
    write_all(tmp_path, {rank: LOSS if rank in (3, 6) else BEFORE for rank in range(8)}, "text")
    if known:
        topology(tmp_path, 8, 10, 4)
    verdict = diagnose_hang(tmp_path)
    assert verdict.exclude == "", "nobody told the nodes' names"
    assert verdict.suspects == ((3, 6) if known else ()) and (known or OPEN in verdict.paragraph)
    assert [len(g.ranks) for g in verdict.groups if g.frames] == [6, 2]


def scene(folder: Path, style: str = "text") -> int:
    """384 dumps with one rank in the data loader; that rank."""
    made = data_loader(Random(7))
    made.style = style
    folder.rmdir()
    write(folder, made)
    return made.guilty.pop()


@pytest.mark.parametrize("style", ["text", "faults"])
def test_a_half_written_dump_is_used_as_far_as_it_goes(style: str, tmp_path: Path) -> None:
    """Where no frame is left, the late rank may be this one, or none."""
    culprit = scene(tmp_path, style)
    path = tmp_path / f"rank_{culprit}.txt"
    text = path.read_text()
    path.write_text(text[: text.index("get_batch") + 20])
    assert diagnose_hang(tmp_path).suspects == (culprit,)
    path.write_text(text[:40])
    path.with_suffix(".log").write_text("Error: of the log of this rank, which is no dump\n")
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and any("truncated" in note for note in verdict.notes)
    assert any(
        f"ranks {culprit} cannot be read; one of them may be late" in note for note in verdict.notes
    )


def test_dumps_of_which_none_can_be_read_are_no_evidence(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "rank0.pickle").write_bytes(b"\x80junk")
    (tmp_path / "rank_1.json").write_text("half")
    assert main(["debug", "hang", str(tmp_path)]) == 2
    assert (
        "holds no dump (py-spy, faulthandler, Flight Recorder) that can be read"
        in capsys.readouterr().err
    )


def test_a_damaged_json_of_py_spy_makes_no_rank_late(tmp_path: Path) -> None:
    """In a file of any name with a rank."""
    culprit = scene(tmp_path, "json")
    assert diagnose_hang(tmp_path).suspects == (culprit,)
    path = (tmp_path / f"rank_{culprit}.txt").rename(tmp_path / f"{culprit}.json")
    path.write_text(path.read_text()[:-9])
    assert diagnose_hang(tmp_path).suspects == ()


def test_a_missing_an_empty_and_other_files_are_no_dump_of_another_rank(tmp_path: Path) -> None:
    culprit = scene(tmp_path)
    (tmp_path / f"rank_{culprit}.txt").unlink()
    for name in (f"states-r7i1n{culprit}.json", f"memory{culprit}.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / f"rank_{(culprit + 1) % 384}.txt").write_text("")
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (culprit,) and len(verdict.notes) == 3, verdict.notes


IN_C = (
    "pthread_cond_wait (libc.so.6)",
    "c10d::Work::wait (csrc/Work.cpp:91)",
    "0x7fa84704524a (libc.so.6)",
)


@pytest.mark.parametrize("options", [{}, {"native": IN_C, "values": VALUES}])
def test_frames_of_c_and_values_of_variables_are_no_stack(
    options: dict[str, Sequence[str]], tmp_path: Path
) -> None:
    """`py-spy dump --native --locals`, as the BLOOM chronicles ask for native frames."""
    for rank in range(8):
        stack = DATA.stack if rank == 5 else ATTENTION.stack if rank > 3 else DP_SUM.stack
        text = pyspy_text(stack, **options)
        (tmp_path / f"rank_{rank}.txt").write_text(
            "".join(f"jz1: {line}\n" for line in text.splitlines())
        )
    topology(tmp_path, 4, 1, 2)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (5,) and len(verdict.groups) == 3


@pytest.mark.parametrize(
    ("header", "main"), [("", "Current thread"), ("Timeout (0:05:00)!\n", "Thread")]
)
def test_of_many_dumps_in_one_file_the_last_counts(header: str, main: str) -> None:
    """Of signals, and of `faulthandler.dump_traceback_later(300, repeat=True)`, where no thread is
    called current.
    """
    fresh = f'{header}Thread 0x00007f0000000740 (most recent call first):\n  File "a.py", line 1 in new\n\n'
    dump = read_faults(
        header + faulthandler_text(LOSS, main) + fresh + faulthandler_text(BEFORE, main)
    )
    assert dump.frames[0].function == "train"


@pytest.mark.parametrize(
    ("ranks", "holders", "apart", "named"),
    [(4, (1,), True, (1,)), (8, (5,), True, (5,)), (8, (5, 6), False, ()), (8, (5,), False, ())],
)
def test_a_lock_that_one_rank_holds_elsewhere_is_a_cause_and_one_where_most_are_is_a_habit(
    ranks: int, holders: tuple[int, ...], apart: bool, named: tuple[int, ...], tmp_path: Path
) -> None:
    """A thread of a profiler holds the global lock wherever it is looked at."""
    for rank in range(ranks):
        stack = ATTENTION.stack if rank in holders and apart else DP_SUM.stack
        text = pyspy_text(stack, 100 + rank, holder=HOLDER if rank in holders else ())
        (tmp_path / f"rank_{rank}.txt").write_text(text)
    topology(tmp_path, 1, 1, ranks)
    reasons = diagnose_hang(tmp_path).reasons
    assert tuple(reasons) == named and all("global lock" in text for text in reasons.values())


def test_a_single_stack_is_no_crowd_that_waits_for_its_cards(tmp_path: Path) -> None:
    write_all(tmp_path, {0: WORK[0]})
    topology(tmp_path, 1, 1, 2)
    assert [group.state for group in diagnose_hang(tmp_path).groups if group.frames] == ["busy"]


FETCH: Stack = (("fetch", "dataset.py", 10), *STEP)
WORK: dict[int, Stack] = dict.fromkeys(range(8), (("linear", "model.py", 30), *STEP))
BACKWARD: dict[int, Stack] = dict.fromkeys(
    range(8), (("_engine_run_backward", "torch/autograd/graph.py", 823), *STEP)
)
MOMENTS: dict[str, tuple[dict[int, Stack], dict[int, Stack], tuple[int, ...]]] = {
    "the last counts": ({5: FETCH}, {5: DATA.stack}, (5,)),
    "who moved to the others is not called stuck": ({5: ITEM}, {}, ()),
    "a job whose every rank moved goes on": ({**WORK, 0: DATA.stack}, {1: DATA.stack}, ()),
    "where most came is not busy": ({**WORK, 2: DATA.stack}, {**BACKWARD, 2: DATA.stack}, (2,)),
}


@pytest.mark.parametrize("name", MOMENTS)
def test_of_two_moments(name: str, tmp_path: Path) -> None:
    *stacks, named = MOMENTS[name]
    for moment, others in enumerate(stacks):
        write_all(tmp_path / f"t{moment}", EIGHT | others)
        topology(tmp_path / f"t{moment}", 1, 1, 8)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == named and (named or "moved" in verdict.to_text())


def test_nodes_are_named_after_their_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 ranks on four nodes, with launchers and workers, and no topology.json."""
    hosts, each = ("r7i1n0", "r8i0n3", "r10i2n5", "r10i2n7"), 4
    worker: Stack = (("_worker_loop", "torch/utils/data/_utils/worker.py", 240), *BEFORE)
    saver: Stack = (
        ("fsync", "io.py", 3),
        ("write_preloaded_data", "strategies/filesystem_async.py", 300),
        *STEP,
    )
    for node, host in enumerate(hosts):
        stacks = [DATA.stack if node == 1 and local == 2 else LOSS for local in range(each)]
        parts = [pyspy_text(stack, 100 + 10 * local) for local, stack in enumerate(stacks)]
        helpers = [pyspy_text(stack, 101 + n) for n, stack in enumerate((LAUNCHER, worker, saver))]
        (tmp_path / f"trace-{host}.out").write_text("".join([*helpers, *parts]))
    assert main(["debug", "hang", str(tmp_path), "--tp=4", "--pp=2", "--dp=2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["suspects"], said["exclude"]) == ([each + 2], "--exclude=r8i0n3")


@pytest.mark.parametrize(("culprits", "exclude"), [((1,), "--exclude=a"), ((1, 9), "")])
def test_all_nodes_are_never_excluded(
    culprits: tuple[int, ...], exclude: str, tmp_path: Path
) -> None:
    """sbatch with every node of the job left out would wait for others.

    A rank without a heartbeat is on the host of its node's other ranks.
    """
    write_all(
        tmp_path, {rank: DATA.stack if rank in culprits else DP_SUM.stack for rank in range(16)}
    )
    plan, facts = small_plan(), {"step": 4, "phase": "", "time": 1.0, "pid": 7}
    nodes = replace(plan.cluster, gpus_per_node=8, max_nodes=2)
    plan = replace(plan, cluster=nodes, topology=replace(plan.topology, dp=16, gbs=32))
    write_topology(
        tmp_path,
        plan,
        {r: Heartbeat(rank=r, host="ab"[r // 8], **facts) for r in range(16) if r != 1},
    )
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == culprits and verdict.exclude == exclude


@pytest.mark.parametrize(("option", "rank"), [("--node_rank=", 6), ("", 2)])
@pytest.mark.parametrize("stack", [DATA.stack, LOSS])
def test_nodes_have_the_numbers_of_their_launchers_else_the_order_of_their_names(
    option: str, rank: int, stack: Stack, tmp_path: Path
) -> None:
    """By that order alone no node is excluded, unless the stack that it printed shows the fault."""
    text = []
    for host, number in (("a", 1), ("b", 0)):
        command = (
            f"torchrun --nnodes 2 {option}{number} train.py" if option else "torchrun train.py"
        )
        dumps = [pyspy_text(LAUNCHER, 90, command=command)]
        for local in range(4):
            shown = stack if (host, local) == ("a", 2) else DP_SUM.stack
            dumps.append(
                pyspy_text(shown, 100 - local, command=f"python train.py --local_rank={local}")
            )
        text += [f"{host}: {line}" for line in "\n".join(dumps).splitlines()]
    (tmp_path / "all.txt").write_text("\n".join(text) + "\n")
    topology(tmp_path, 1, 1, 8, gpus_per_node=4)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (rank,)
    assert any("--node_rank" in note for note in verdict.notes) is (not option)
    assert verdict.exclude == "--exclude=a" * (stack is DATA.stack or bool(option))


def merged(names: Sequence[str] = ("node1", "node2", "node10")) -> str:
    """The dumps of three hosts of four ranks, lines mixed as they come; the second's third is in
    its data.
    """
    left = {}
    for host, name in enumerate(names):
        stacks = [DATA.stack if (host, local) == (1, 2) else LOSS for local in range(4)]
        parts = [
            pyspy_text(LAUNCHER, 90),
            *(pyspy_text(stack, 100 + local) for local, stack in enumerate(stacks)),
        ]
        left[name] = "".join(parts).splitlines()
    random, lines = Random(3), ["/usr/bin/pdsh", "hostfile=hostfile"]
    while any(left.values()):
        name = random.choice([name for name, rest in left.items() if rest])
        lines.append(f"{name}: {left[name].pop(0)}".rstrip())
    return "\n".join([*lines, "pdsh@login: node2: ssh exited with exit code 123"]) + "\n"


@pytest.mark.parametrize(
    ("text", "exclude"), [(merged(), "--exclude=node2"), (merged((" 0", " 1", "10")), "")]
)
def test_the_culprit_in_a_file_of_three_hosts_is_named(
    text: str, exclude: str, tmp_path: Path
) -> None:
    """As pdsh and `srun --label` leave it."""
    (tmp_path / "dump.txt").write_text(text)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (6,) and verdict.exclude == exclude, verdict.to_text()
    assert sum(len(group.ranks) for group in verdict.groups) == 12


@pytest.mark.parametrize("write", [pyspy_text, faulthandler_text])
def test_where_a_label_has_one_process_it_is_the_rank(
    write: Callable[[Stack], str], tmp_path: Path
) -> None:
    """`srun --label` of a job with a task for each GPU."""
    texts = [write(DATA.stack if rank == 2 else LOSS) for rank in range(4)]
    lines = [f"{rank}: {line}" for rank, text in enumerate(texts) for line in text.splitlines()]
    (tmp_path / "dump.txt").write_text("\n".join(lines) + "\n")
    assert diagnose_hang(tmp_path).suspects == (2,)


@pytest.mark.parametrize(
    "form", ["{rule}\nnode1\n{rule}\n{text}", "[rank3]: {lines}", "[1,3]<stdout>: {lines}"]
)
def test_of_other_labels_no_rank_is_guessed(form: str, tmp_path: Path) -> None:
    """dshbak's headings, torch's and mpirun's labels."""
    for text in (pyspy_text(LOSS), faulthandler_text(LOSS)):
        lines = text.replace("\n", "\n" + form.partition("{lines}")[0])
        (tmp_path / "dump.txt").write_text(
            form.format(rule="-" * 16, text=text, lines=lines) + "\n"
        )
        with pytest.raises(ValueError, match="holds no dump"):
            diagnose_hang(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "holds no dump"),
        (["--tp", "-1"], "tp=-1: must be"),
        (
            ["--gpus-per-node", "0", "--tp", "2"],
            "gpus_per_node=0: must be a whole number of at least 1",
        ),
        (["--tp", "99999", "--pp", "99999"], "tp x pp x dp=9999800001: must be at most 131072"),
    ],
)
def test_a_bad_call_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["debug", "hang", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
