"""Whoever is to blame for a hang is named, from dumps of any kind, also bad ones."""

import json
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from dumps import VALUES, faulthandler_text, pyspy_json, pyspy_text, recording, topology, write_all
from job import ATTENTION, DATA, DP_SUM, GRID, MLP_SUM, RECV_B, ROOT, STEP, Stack, c10d
from plants import PLANTS, data_loader, write
from support import REPOSITORY

from trilane.cli.app import main
from trilane.diagnose.hang.tracebacks import read_faults
from trilane.diagnose.hang.verdict import diagnose_hang

BEFORE: Stack = (("train", "megatron/training.py", 915), *ROOT[1:])
LOSS: Stack = (
    ("broadcast", "torch/distributed/distributed_c10d.py", 1191),
    ("_aggregate_total_loss", "deepspeed/runtime/pipe/engine.py", 540),
    ("train_batch", "deepspeed/runtime/pipe/engine.py", 330),
    *STEP,
)


@pytest.mark.parametrize("kind", PLANTS)
def test_the_culprit_among_384_ranks_is_named(kind: str, tmp_path: Path) -> None:
    scene = PLANTS[kind](Random(kind))
    write(tmp_path / "dumps", scene)
    verdict = diagnose_hang(tmp_path / "dumps")
    assert scene.guilty <= set(verdict.suspects) <= (scene.allowed or scene.guilty), verdict.paragraph
    assert set(verdict.nodes) >= {GRID[rank].node for rank in scene.guilty}


def test_384_dumps_are_judged_within_10_s_and_500_mb(tmp_path: Path) -> None:
    """In a process of its own, so that its memory is its own; 10 s are 20 times what it takes."""
    write(tmp_path / "dumps", data_loader(Random(1)))
    code = "import sys; from trilane.cli.app import main; main(sys.argv[1:])\n"
    # getrusage(2) would count what this process holds: a child has it for a moment, until it begins.
    code += "print(next(x.split()[1] for x in open('/proc/self/status') if x.startswith('VmHWM')), file=sys.stderr)"
    command = [sys.executable, "-c", code, "debug", "hang", str(tmp_path / "dumps"), "--json"]
    begin = time.monotonic()
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "lib")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    assert time.monotonic() - begin < 10 and int(done.stderr) * 1024 < 500e6
    assert {"groups", "waiting_for", "suspects", "nodes", "exclude"} <= json.loads(done.stdout).keys()


@pytest.mark.parametrize("known", [True, False])
def test_document_003_two_of_eight_ranks_are_still_in_the_broadcast_of_the_loss(known: bool, tmp_path: Path) -> None:
    """Node 0 of TP 8, PP 10, DP 4: six wait in train at line 915, two never left train_step."""
    write_all(tmp_path, {rank: LOSS if rank in (3, 6) else BEFORE for rank in range(8)}, "text")
    if known:
        topology(tmp_path, 8, 10, 4)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (3, 6)
    assert [len(g.ranks) for g in verdict.groups if g.frames] == [6, 2]
    assert "in broadcast, called by _aggregate_total_loss" in verdict.reasons[3]
    assert "6 of" in verdict.paragraph and "train (megatron/training.py:915)" in verdict.paragraph
    if known:
        assert "312 of 320 ranks have no dump" in " ".join(verdict.notes)
        assert verdict.exclude == "" and "the first node" in verdict.paragraph  # nobody told its name


def scene(folder: Path, style: str = "json") -> int:
    """384 dumps with one rank in the data loader; that rank."""
    made = data_loader(Random(7))
    made.style = style
    write(folder, made)
    return made.guilty.pop()


def test_missing_ranks_are_said_and_count_as_evidence(tmp_path: Path) -> None:
    culprit = scene(tmp_path / "d")
    (tmp_path / "d" / f"rank_{culprit}.json").unlink()
    verdict = diagnose_hang(tmp_path / "d")
    assert verdict.suspects == (culprit,)
    (note,) = verdict.notes
    assert note.startswith(f"missing: rank {culprit}: ")


@pytest.mark.parametrize("style", ["json", "text", "faults", "mixed"])
def test_any_format_and_a_mixture_give_one_verdict(style: str, tmp_path: Path) -> None:
    culprit = scene(tmp_path / "d", style)
    verdict = diagnose_hang(tmp_path / "d")
    assert verdict.suspects == (culprit,) and len(verdict.groups) <= 12


@pytest.mark.parametrize("style", ["json", "text", "faults"])
def test_a_half_written_dump_is_used_as_far_as_it_goes(style: str, tmp_path: Path) -> None:
    culprit = scene(tmp_path / "d", style)
    for rank in (culprit, (culprit + 9) % 384):
        path = next((tmp_path / "d").glob(f"rank_{rank}.*"))
        text = path.read_text()
        where = {"json": "MainThread", "text": "get_batch", "faults": "get_batch"}[style]
        path.write_text(text[: text.index(where) + (900 if style == "json" else 20)] if rank == culprit else text[:200])
    verdict = diagnose_hang(tmp_path / "d")
    assert verdict.suspects[0] == culprit, verdict.paragraph
    assert any(note.startswith("truncated dumps: ranks") for note in verdict.notes)


def test_what_lies_beside_the_dumps_is_of_no_rank(tmp_path: Path) -> None:
    """states-HOST.json is the watchdog's, and the end of a host's name is no rank."""
    culprit = scene(tmp_path / "d")
    (tmp_path / "d" / f"rank_{culprit}.json").unlink()
    for name in (f"states-r7i1n{culprit}.json", f"memory{culprit}.json"):
        (tmp_path / "d" / name).write_text("{}")
    verdict = diagnose_hang(tmp_path / "d")
    assert verdict.suspects == (culprit,) and not any("states-" in note for note in verdict.notes)


def test_an_empty_dump_is_said_and_nothing_is_concluded_from_it(tmp_path: Path) -> None:
    culprit = scene(tmp_path / "d")
    (tmp_path / "d" / f"rank_{(culprit + 1) % 384}.json").write_text("")
    verdict = diagnose_hang(tmp_path / "d")
    assert verdict.suspects == (culprit,)
    assert any("cannot be read; nothing is concluded" in note for note in verdict.notes)


def test_of_two_moments_the_last_counts_and_who_moved_is_said(tmp_path: Path) -> None:
    culprit = scene(tmp_path / "t1")
    (tmp_path / "t0").mkdir()
    stack: Stack = (("fetch", "dataset.py", 10), *STEP)
    (tmp_path / "t0" / f"rank_{culprit}.json").write_text(pyspy_json(stack))
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (culprit,)
    assert f"between the two moments rank {culprit} moved: slow rather than stuck" in " ".join(verdict.notes)


def test_dumps_taken_minutes_apart_are_said_to_be_of_two_moments(tmp_path: Path) -> None:
    scene(tmp_path / "d")
    os.utime(tmp_path / "d" / "rank_5.json", (1e9, 1e9))
    assert any("minutes apart" in note for note in diagnose_hang(tmp_path / "d").notes)


def test_without_a_topology_the_culprit_is_named_too_and_the_lack_is_said(tmp_path: Path) -> None:
    culprit = scene(tmp_path / "d")
    (tmp_path / "d" / "topology.json").unlink()
    verdict = diagnose_hang(tmp_path / "d")
    assert culprit in verdict.suspects
    assert any("no topology file" in note for note in verdict.notes)


def test_files_of_whole_nodes_as_srun_leaves_them_are_taken_apart(tmp_path: Path) -> None:
    """Launcher, eight ranks out of order, a data loader's worker: as `ps | xargs py-spy dump` on two nodes."""
    for node in range(2):
        parts = [pyspy_text((("_invoke_run", "torch/distributed/elastic/agent/server/api.py", 1),), 90)]
        for local in (3, 1, 0, 2, 7, 6, 5, 4):
            stack = LOSS if (node, local) == (1, 2) else BEFORE
            parts.append(pyspy_text(stack, 100 + local, command=f"python pretrain_gpt.py --local_rank={local}"))
        parts.append(pyspy_text((("_worker_loop", "torch/utils/data/_utils/worker.py", 240), *BEFORE), 300))
        (tmp_path / f"trace-jean-zay-iam{node + 1:02d}.out").write_text("\n".join(parts))
    assert diagnose_hang(tmp_path).suspects == (10,)
    assert diagnose_hang(tmp_path).exclude == "--exclude=jean-zay-iam02"


HOSTS = ("r7i1n0", "r8i0n3", "r10i2n5", "r10i2n7")


@pytest.mark.parametrize(("hosts", "left_out"), [(HOSTS[:2], 0), (HOSTS, 0), (HOSTS[:2], 1)])
def test_nodes_are_named_after_their_files(
    hosts: Sequence[str], left_out: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 ranks on nodes of 8 and of 4, and no topology.json: --exclude must name nodes that there are."""
    each = 16 // len(hosts)
    for node, host in enumerate(hosts):
        stacks = [DATA.stack if node == 1 and local == 2 else LOSS for local in range(each - left_out)]
        text = "".join(pyspy_text(stack, 100 + local) for local, stack in enumerate(stacks))
        (tmp_path / f"trace-{host}.out").write_text(text)
    assert main(["debug", "hang", str(tmp_path), "--tp=4", "--pp=2", "--dp=2", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["suspects"][0], said["nodes"][0]) == (each + 2, "r8i0n3") and ", r8i0n3): in" in said["verdict"]
    assert left_out or said["exclude"] == "--exclude=r8i0n3"


def test_where_no_host_was_told_none_is_excluded(tmp_path: Path) -> None:
    write_all(tmp_path, {rank: DATA.stack if rank == 17 else LOSS for rank in range(32)})
    topology(tmp_path, 8, 4, 1)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (17,) and verdict.exclude == ""
    assert "Rank 17 (tp 1, pp 2, dp 0, the third node)" in verdict.paragraph


def test_a_rank_without_a_host_is_where_the_others_of_its_node_are(tmp_path: Path) -> None:
    """As the watchdog's topology.json of a rank that never wrote a heartbeat."""
    write_all(tmp_path, {rank: DATA.stack if rank == 9 else LOSS for rank in range(24)})
    ranks = [
        {"rank": r, "node": f"node{r // 8}", **({} if r in (9, 16) else {"host": HOSTS[r // 8]})} for r in range(24)
    ]
    topology(tmp_path, 8, 3, 1, ranks=ranks)
    assert diagnose_hang(tmp_path).exclude == "--exclude=r8i0n3"


IN_C = ("pthread_cond_wait (libc.so.6)", "c10d::Work::wait (csrc/Work.cpp:91)", "0x7fa84704524a (libc.so.6)")


@pytest.mark.parametrize("options", [{}, {"native": IN_C}, {"values": VALUES}, {"native": IN_C, "values": VALUES}])
def test_frames_of_c_and_values_of_variables_are_no_stack(options: dict[str, Sequence[str]], tmp_path: Path) -> None:
    """`py-spy dump --native --locals`, as document 003 asks for native frames."""
    for rank in range(8):
        stack = DATA.stack if rank == 5 else ATTENTION.stack if rank > 3 else DP_SUM.stack
        text = pyspy_text(stack, **options)
        (tmp_path / f"rank_{rank}.txt").write_text("".join(f"jz1: {line}\n" for line in text.splitlines()))
    topology(tmp_path, 4, 1, 2)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (5,) and len(verdict.groups) == 3


@pytest.mark.parametrize(("header", "main"), [("", "Current thread"), ("Timeout (0:05:00)!\n", "Thread")])
def test_of_many_dumps_in_one_file_the_last_counts(header: str, main: str) -> None:
    """Of signals, and of `faulthandler.dump_traceback_later(300, repeat=True)`, where no thread is called current."""
    fresh = f'{header}Thread 0x00007f0000000740 (most recent call first):\n  File "a.py", line 1 in new\n\n'
    dump = read_faults(header + faulthandler_text(LOSS, main) + fresh + faulthandler_text(BEFORE, main))
    assert dump.main.frames[0].function == "train"
    assert len(dump.threads) == (3 if header else 2)  # of signals, a thread that is new is taken for the last dump's


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch /tmp/never",)


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    call = {"group": "dp", "sequence": 1, "op": "all_reduce", "state": "started"}
    (tmp_path / "nccl_trace_rank_0").write_bytes(recording([call], {"dp": [0, 1]}))
    (tmp_path / "nccl_trace_rank_1").write_bytes(pickle.dumps({"entries": Evil()}))
    verdict = diagnose_hang(tmp_path)
    assert any("which no Flight Recorder dump needs" in note for note in verdict.notes)


BAD = [
    ([], "holds no dump"),
    (["--tp", "-1"], "tp=-1: must be"),
    (["--gpus-per-node", "0", "--tp", "2"], "gpus_per_node=0: must be a whole number of at least 1"),
    (["--tp", "99999", "--pp", "99999"], "tp x pp x dp=9999800001: must be at most 131072"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_a_bad_call_is_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["debug", "hang", str(tmp_path), *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_who_left_an_iteration_out_is_more_to_blame_than_who_waits_for_its_neighbour(tmp_path: Path) -> None:
    """The real hang "skip", TP 2 x PP 2 x DP 2: rank 5 is already where all ask for signals, in the same iteration."""
    signals = (("now", "trilane/engine/stop_requests.py", 52), ("run", "trilane/engine/loop.py", 67), *ROOT)
    stacks = dict.fromkeys((2, 3, 6, 7), DP_SUM.stack) | dict.fromkeys((0, 4), ATTENTION.stack)
    stacks[4] = MLP_SUM.stack[:2] + ATTENTION.stack[2:3] + MLP_SUM.stack[3:] + ROOT  # the same line in another layer
    write_all(tmp_path, {**stacks, 1: RECV_B.stack, 5: (*c10d("all_reduce"), *signals)})
    topology(tmp_path, 2, 2, 2)
    assert diagnose_hang(tmp_path).suspects == (5,)


def test_where_everybody_came_nobody_is_blamed(tmp_path: Path) -> None:
    write_all(tmp_path, dict.fromkeys(range(8), LOSS))
    topology(tmp_path, 2, 2, 2)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and verdict.exclude == "" and "same collective" in verdict.paragraph
