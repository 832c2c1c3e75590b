"""What a verdict states is true: what dumps cannot show is stated as such, and no innocent rank is named.

Frames of Ray are those of python/ray/_private/worker.py and python/ray/train/_internal/session.py
(https://github.com/ray-project/ray), of torch those of torch/_tensor_str.py.
"""

from pathlib import Path

import pytest
from dumps import pyspy_json, pyspy_text, topology, write_all
from job import ATTENTION, DATA, DP_SUM, ROOT, STEP, Stack, c10d

from trilane.diagnose.hang.verdict import Verdict, diagnose_hang

ITEM: Stack = (("log_loss", "train.py", 77), *STEP)
SYNC: Stack = (("synchronize", "torch/cuda/__init__.py", 1040), *ITEM)
PRINTED: Stack = (("__init__", "torch/_tensor_str.py", 140), ("__repr__", "torch/_tensor.py", 461), *ITEM)
CUDA = ("cuStreamSynchronize (libcuda.so.1)", "cudaStreamSynchronize (libcudart.so.12)")


def eight(folder: Path, others: dict[int, Stack], usual: Stack = DP_SUM.stack) -> Verdict:
    """Of eight replicas."""
    write_all(folder, dict.fromkeys(range(8), usual) | others)
    topology(folder, 1, 1, 8, hosts=["a", "b"], gpus_per_node=4)
    return diagnose_hang(folder)


@pytest.mark.parametrize("dumped", [4, 3, 1])
def test_where_half_of_the_dumps_are_missing_it_is_no_absence_of_a_hang(dumped: int, tmp_path: Path) -> None:
    write_all(tmp_path, dict.fromkeys(range(dumped), DP_SUM.stack))
    topology(tmp_path, 1, 1, 8)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and "no hang" not in verdict.paragraph
    assert f"among ranks {dumped}-7" in verdict.paragraph and "cannot be determined" in verdict.paragraph


@pytest.mark.parametrize("line", ["using world size: 8, data-parallel-size: 8\n", "        world_size: 8\n", ""])
def test_the_number_of_ranks_is_that_of_the_job_and_not_of_the_dumps(line: str, tmp_path: Path) -> None:
    write_all(tmp_path, dict.fromkeys(range(4), DP_SUM.stack))
    (tmp_path / "train.log").write_text(line)
    verdict = diagnose_hang(tmp_path)
    expected = (
        "ranks 4-7, of which there is no readable dump"
        if line
        else "whether another one did not come cannot be determined"
    )
    assert verdict.suspects == () and expected in verdict.paragraph and "every group" not in verdict.paragraph


@pytest.mark.parametrize("stack", [SYNC, PRINTED])
@pytest.mark.parametrize("ranks", [(3,), (1, 2, 3, 4, 5, 6, 7)])
def test_who_waits_for_its_gpu_is_not_named(stack: Stack, ranks: tuple[int, ...], tmp_path: Path) -> None:
    """The kernel may be a collective that all have begun."""
    verdict = eight(tmp_path, dict.fromkeys(ranks, stack))
    assert verdict.suspects == () and "cannot be determined" in verdict.paragraph and "GPU" in verdict.paragraph


def test_who_is_at_an_earlier_line_than_ranks_that_wait_for_their_gpus_is_not_named(tmp_path: Path) -> None:
    """Its GPU's queue may be full of what theirs wait for."""
    later: Stack = (("synchronize", "torch/cuda/__init__.py", 1040), ("train", "megatron/training.py", 915), *ROOT[1:])
    verdict = eight(tmp_path, {3: (*c10d("all_reduce"), ("loss", "train.py", 9), *ROOT)}, later)
    assert verdict.suspects == () and "cannot be determined" in verdict.paragraph


def test_native_frames_show_that_a_line_waits_for_its_gpu(tmp_path: Path) -> None:
    eight(tmp_path, {})
    (tmp_path / "rank_3.json").unlink()
    (tmp_path / "rank_3.txt").write_text(pyspy_text(ITEM, native=CUDA))
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and "1 of 8 ranks (3) wait for the GPU, called by log_loss" in verdict.paragraph


def test_a_line_that_may_wait_for_its_gpu_is_named_with_that_doubt_and_its_node_is_not_excluded(tmp_path: Path) -> None:
    verdict = eight(tmp_path, {3: ITEM})
    assert verdict.suspects == (3,) and "cannot be determined from stacks" in verdict.reasons[3]
    assert verdict.exclude == ""


def test_lines_that_may_wait_for_their_gpus_are_not_named_beside_a_rank_in_its_data(tmp_path: Path) -> None:
    verdict = eight(tmp_path, {0: ITEM, 1: ITEM, 2: (("forward", "model.py", 9), *STEP), 7: DATA.stack})
    assert verdict.suspects == (7,) and verdict.exclude == "--exclude=b"


def test_where_no_rank_waits_none_is_to_blame(tmp_path: Path) -> None:
    verdict = eight(tmp_path, {r: (("compute", "model.py", 100 + r), *STEP) for r in range(8)})
    assert verdict.suspects == () and "cannot be determined" in verdict.paragraph


def ray_text(rank: int, training: Stack) -> str:
    """An actor of Ray Train: the main thread serves Ray, and the user's function runs in a thread of the session."""
    main: Stack = (
        ("get", "queue.py", 180),
        ("get_next", "ray/train/_internal/session.py", 300),
        ("actor_method_executor", "ray/_private/function_manager.py", 696),
        ("main_loop", "ray/_private/worker.py", 876),
        ("<module>", "ray/_private/workers/default_worker.py", 289),
    )
    runner: Stack = (
        *training,
        ("discard_return_wrapper", "ray/train/_internal/utils.py", 45),
        ("run", "ray/air/_internal/util.py", 104),
        ("_bootstrap_inner", "threading.py", 1016),
        ("_bootstrap", "threading.py", 973),
    )
    text = pyspy_text(main, 100 + rank, command="ray::_RayTrainWorker__execute.get_next")
    return text + f'Thread {rank} (active): "Thread-3"\n' + "".join(f"    {f} ({p}:{n})\n" for f, p, n in runner)


def test_of_a_ray_actor_the_thread_that_trains_counts(tmp_path: Path) -> None:
    for rank in range(8):
        (tmp_path / f"rank_{rank}.txt").write_text(ray_text(rank, DATA.stack if rank == 5 else DP_SUM.stack))
    topology(tmp_path, 1, 1, 8)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (5,) and "7 of 8 ranks (0-4, 6-7) wait in all_reduce" in verdict.paragraph


@pytest.mark.parametrize(
    ("state", "dumped", "words"),
    [
        ("t", True, "by a debugger or another tracer (state t)"),
        ("T", True, "by a signal (state T)"),
        ("Z", False, "has ended (state Z)"),
        ("D", False, "uninterruptible sleep (state D)"),
    ],
)
def test_the_state_of_a_process_is_stated(state: str, dumped: bool, words: str, tmp_path: Path) -> None:
    write_all(tmp_path, {rank: DP_SUM.stack for rank in range(8) if rank != 6 or dumped})
    topology(tmp_path, 1, 1, 8, ranks=[{"rank": 6, "state": state}])
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (6,) and words in verdict.reasons[6]


def test_a_waiting_rank_in_state_d_is_an_observation(tmp_path: Path) -> None:
    write_all(tmp_path, dict.fromkeys(range(8), DP_SUM.stack))
    topology(tmp_path, 1, 1, 8, ranks=[{"rank": 6, "state": "D"}])
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and "state D" in verdict.paragraph


HOLDER: Stack = (("match", "re.py", 190), ("scan", "monitor.py", 12), ("_bootstrap", "threading.py", 973))


@pytest.mark.parametrize("moments", [1, 2])
def test_of_ranks_in_one_line_the_holder_of_the_lock_is_an_observation(moments: int, tmp_path: Path) -> None:
    """Any thread that runs Python holds the lock then; the collective may hang by itself."""
    for moment in range(moments):
        folder = tmp_path / f"t{moment}"
        write_all(folder, dict.fromkeys(range(8), DP_SUM.stack))
        (folder / "rank_5.json").write_text(pyspy_json(DP_SUM.stack, 105, HOLDER))
    topology(tmp_path, 1, 1, 8)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and "holds Python's global lock in match (re.py:190)" in verdict.paragraph
    assert ("in both dumps" in verdict.paragraph) is (moments == 2)


@pytest.mark.parametrize(
    "error",
    [
        "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address.",
        "torch.distributed.DistNetworkError: failed to recv, got 0 bytes",
        "RuntimeError: Stop_waiting response is expected",
    ],
)
def test_an_error_for_lack_of_another_rank_is_no_cause(error: str, tmp_path: Path) -> None:
    write_all(tmp_path, {rank: DATA.stack if rank == 7 else DP_SUM.stack for rank in range(8) if rank != 2})
    lines = "".join(f'  File "{file}", line {n}, in {f}\n    x()\n' for f, file, n in reversed(DP_SUM.stack))
    (tmp_path / "rank_2.log").write_text(f"Traceback (most recent call last):\n{lines}{error}\n")
    topology(tmp_path, 1, 1, 8)
    assert diagnose_hang(tmp_path).suspects == (7,)


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (("compute", "/mnt/data/model.py", 9), "outside communication"),
        (("wait", "/usr/lib/python3.11/threading.py", 324), "waiting for a lock"),
        (("read", "indexed_dataset.py", 9), "in the data loader"),
        (("linear", "torch/nn/functional.py", 9), "outside communication"),
        (("readline", "codecs.py", 1), "in input or output (a file, a pipe or a socket)"),
        (
            ("acquire_read", "device_communicators/shm_broadcast.py", 9),
            "idle, without a task of Ray's or a request to vLLM",
        ),
    ],
)
def test_an_activity_is_of_the_innermost_frames_and_not_of_the_folder(
    frame: tuple[str, str, int], text: str, tmp_path: Path
) -> None:
    started: Stack = (
        ("checkpoint", "torch/utils/checkpoint.py", 500),
        ("main", "run.py", 9),
        ("run", "/usr/lib/python3.11/threading.py", 953),
    )
    verdict = eight(tmp_path, {3: (frame, *started)})
    assert verdict.suspects == (3,) and verdict.reasons[3].partition(";")[0] == text


def test_a_group_that_no_name_in_the_stack_shows_is_not_stated(tmp_path: Path) -> None:
    custom: Stack = (*c10d("all_reduce"), ("custom", "own.py", 5), *STEP)
    write_all(tmp_path, {r: DATA.stack if r == 2 else custom for r in range(4)})
    topology(tmp_path, 2, 1, 2)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (2,) and " over " not in verdict.paragraph


PURPOSES = {
    "in the data loader": (("select", "selectors.py", 416), ("_next_data", "torch/utils/data/dataloader.py", 1328)),
    "in a debugger": (("readline", "codecs.py", 1), ("cmdloop", "cmd.py", 126), ("interaction", "pdb.py", 366)),
    "in a network request": (("recv_into", "socket.py", 705), ("request", "requests/sessions.py", 589)),
    "leaving the program": (("join", "threading.py", 1119), ("_exit_function", "multiprocessing/util.py", 360)),
    "in checkpoint input/output": (("write", "zipfile.py", 9), ("save_checkpoint", "megatron/training/training.py", 9)),
}


@pytest.mark.parametrize("purpose", PURPOSES)
def test_what_a_rank_does_is_stated_by_its_purpose(purpose: str, tmp_path: Path) -> None:
    verdict = eight(tmp_path, {3: (*PURPOSES[purpose], *STEP)})
    assert verdict.suspects == (3,) and verdict.reasons[3] == purpose and verdict.exclude == "--exclude=a"


def test_a_collective_that_waits_for_the_gpu_in_c_is_a_collective(tmp_path: Path) -> None:
    """A barrier of NCCL, with --native."""
    topology(tmp_path, 1, 1, 8)
    for rank in range(8):
        stack = DATA.stack if rank == 5 else (*c10d("barrier"), *STEP)
        (tmp_path / f"rank_{rank}.txt").write_text(pyspy_text(stack, native=CUDA if rank != 5 else ()))
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (5,) and "wait in barrier over all ranks" in verdict.paragraph


def test_activation_checkpointing_is_no_collective_of_all_ranks(tmp_path: Path) -> None:
    again = ("checkpoint", "torch/utils/checkpoint.py", 500)
    stack: Stack = (*c10d("all_reduce"), ("mine", "model.py", 5), again, *STEP)
    assert "over all ranks" not in eight(tmp_path, {5: DATA.stack}, stack).paragraph


def test_ranks_that_moved_are_not_called_stuck(tmp_path: Path) -> None:
    for moment, stack in enumerate((ITEM, DP_SUM.stack)):
        write_all(tmp_path / f"t{moment}", dict.fromkeys(range(8), DP_SUM.stack) | {5: stack})
    topology(tmp_path, 1, 1, 8)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and "rank 5 moved" in verdict.paragraph and "network" not in verdict.paragraph


def test_only_ranks_at_one_line_are_said_to_be_at_one(tmp_path: Path) -> None:
    paragraph = eight(tmp_path, {4: PRINTED}).paragraph
    assert "same line" not in paragraph and "Ranks 4 wait" in paragraph


def test_the_processes_that_write_a_checkpoint_are_no_ranks(tmp_path: Path) -> None:
    """Megatron's asynchronous save forks a process, whose stack holds its parent's."""
    parts = []
    for local in range(8):
        parts.append(pyspy_text(DATA.stack if local == 5 else DP_SUM.stack, 100 + 10 * local))
        writer: Stack = (("fsync", "io.py", 3), ("write_preloaded_data", "strategies/filesystem_async.py", 300), *STEP)
        parts.append(pyspy_text(writer, 105 + 10 * local))
    (tmp_path / "trace-r1.out").write_text("\n".join(parts))
    topology(tmp_path, 1, 1, 8)
    assert diagnose_hang(tmp_path).suspects == (5,)


def test_a_ray_actor_that_trains_in_its_main_thread_is_read_there(tmp_path: Path) -> None:
    """An actor without a thread of its own, and with one of the user that only watches."""
    serve: Stack = (
        ("actor_method_executor", "ray/_private/function_manager.py", 696),
        ("main_loop", "ray/_private/worker.py", 876),
    )
    frames = "".join(
        f"    {f}\n" for f in (*["watch (mine.py:3)"] * 60, "run (threading.py:953)", "_bootstrap (threading.py:973)")
    )
    watch = f'Thread 7 (idle): "Thread-9"\n{frames}'
    for rank in range(8):
        stack = (*(DATA.stack if rank == 5 else DP_SUM.stack)[:-1], *serve)
        (tmp_path / f"rank_{rank}.txt").write_text(pyspy_text(stack, 100 + rank) + watch)
    topology(tmp_path, 1, 1, 8)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (5,) and "wait in all_reduce" in verdict.paragraph


def test_without_a_topology_ranks_in_two_collectives_may_be_of_two_groups(tmp_path: Path) -> None:
    write_all(tmp_path, {r: ATTENTION.stack if r < 2 else DP_SUM.stack for r in range(8)})
    verdict = diagnose_hang(tmp_path)
    assert "of its group" not in verdict.paragraph and verdict.exclude == ""
    assert all("cannot be determined" in verdict.reasons[r] for r in verdict.suspects)


def test_three_of_eight_in_another_collective_are_no_clear_minority(tmp_path: Path) -> None:
    verdict = eight(tmp_path, dict.fromkeys((1, 4, 6), (*c10d("barrier"), *STEP)))
    assert len(verdict.suspects) == 8 and "cannot be determined" in verdict.paragraph and verdict.first is None


def test_where_most_processes_are_gone_none_is_called_the_first(tmp_path: Path) -> None:
    write_all(tmp_path, {7: DP_SUM.stack})
    topology(tmp_path, 1, 1, 8, ranks=[{"rank": r, "state": "gone"} for r in range(7)])
    assert "which rank was the first to end cannot be determined" in diagnose_hang(tmp_path).paragraph


def test_ranks_numbered_by_their_process_ids_are_said_to_be(tmp_path: Path) -> None:
    parts = [pyspy_text(DATA.stack if n == 2 else DP_SUM.stack, 100 + n) for n in range(4)]
    (tmp_path / "trace-r1.out").write_text("\n".join(parts))
    assert "order of their process ids" in " ".join(diagnose_hang(tmp_path).notes)


RECEIVES: Stack = (*c10d("recv"), ("recv_backward", "pipeline_parallel/p2p_communication.py", 450), *STEP)


def test_a_stage_whose_ranks_are_all_in_their_collectives_is_not_late_for_the_one_before(tmp_path: Path) -> None:
    """TP 2 x PP 2 x DP 2: the first stage waits for gradients, the second one's tensor groups are complete."""
    write_all(tmp_path, {r: RECEIVES if r < 4 else ATTENTION.stack for r in range(8)})
    topology(tmp_path, 2, 2, 2)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and "Ranks 4-7, for which the others wait" in verdict.paragraph


def test_a_line_of_a_function_that_sums_norms_may_compute_or_wait(tmp_path: Path) -> None:
    verdict = eight(tmp_path, {2: (("get_grad_norm_fp32", "core/optimizer/clip_grads.py", 130), *STEP)})
    assert verdict.suspects == (2,) and "in wait" not in verdict.paragraph and verdict.exclude == ""
    assert "cannot be determined from stacks" in verdict.reasons[2]


def test_ranks_without_a_dump_are_not_named_beside_one_in_its_data(tmp_path: Path) -> None:
    write_all(tmp_path, dict.fromkeys(range(1, 5), DP_SUM.stack) | {0: DATA.stack})
    topology(tmp_path, 1, 1, 8)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (0,) and any("ranks 5-7" in note for note in verdict.notes)


def test_a_job_whose_every_rank_moved_goes_on(tmp_path: Path) -> None:
    for moment, stack in enumerate((STEP, DP_SUM.stack)):
        write_all(tmp_path / f"t{moment}", {r: DATA.stack if r == moment else stack for r in range(8)})
    topology(tmp_path, 1, 1, 8)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and "goes on" in verdict.paragraph


def test_where_few_ranks_wait_the_job_may_be_between_two_steps(tmp_path: Path) -> None:
    computing: dict[int, Stack] = {r: (("linear", "model.py", 30 + r), *STEP) for r in range(8)}
    verdict = eight(tmp_path, computing | {2: DATA.stack, 3: DP_SUM.stack})
    assert "cannot be determined from one dump" in verdict.paragraph and verdict.exclude == ""


def test_ranks_that_came_to_the_line_where_most_are_are_not_busy_there(tmp_path: Path) -> None:
    backward: Stack = (("_engine_run_backward", "torch/autograd/graph.py", 823), *STEP)
    for moment, stack in enumerate(((("linear", "model.py", 30), *STEP), backward)):
        write_all(tmp_path / f"t{moment}", dict.fromkeys(range(8), stack) | {2: DATA.stack})
    topology(tmp_path, 1, 1, 8)
    assert diagnose_hang(tmp_path).suspects == (2,)


def test_one_dump_shows_one_moment(tmp_path: Path) -> None:
    assert "a second one shows" in eight(tmp_path, {7: DATA.stack}).paragraph


def test_the_node_of_a_rank_that_was_perhaps_not_dumped_is_not_excluded(tmp_path: Path) -> None:
    eight(tmp_path, {})
    (tmp_path / "rank_3.json").unlink()
    verdict = diagnose_hang(tmp_path)
    assert verdict.exclude == "" and "or was not dumped" in verdict.paragraph


def test_experts_that_exchange_tokens_are_of_a_group_that_is_not_known(tmp_path: Path) -> None:
    """Ranks 4 to 7 are all in one all-to-all, of a group of experts perhaps, while the others sum their gradients."""
    moe: Stack = (*c10d("all_to_all_single"), ("forward", "core/tensor_parallel/mappings.py", 430), *STEP)
    verdict = eight(tmp_path, dict.fromkeys(range(4, 8), moe), DP_SUM.stack)
    assert verdict.suspects == () and "over all ranks" not in verdict.paragraph
    assert "whether all of it have come, or the network is at fault, cannot be determined" in verdict.paragraph


def test_the_group_of_a_name_that_cannot_be_right_is_not_printed(tmp_path: Path) -> None:
    stack: Stack = (*c10d("all_reduce"), ("forward", "core/tensor_parallel/mappings.py", 430), *STEP)
    paragraph = eight(tmp_path, {5: DATA.stack}, stack).paragraph  # tp 1
    assert "in all_reduce, called by forward" in paragraph


@pytest.mark.parametrize("option", ["--node_rank=", "--node-rank "])
def test_nodes_have_the_numbers_of_their_launchers(option: str, tmp_path: Path) -> None:
    text = []
    for host, number in (("a", 1), ("b", 0)):
        launcher: Stack = (("_invoke_run", "torch/distributed/elastic/agent/server/api.py", 1),)
        dumps = [pyspy_text(launcher, 90, command=f"torchrun --nnodes 2 {option}{number} train.py")]
        for local in range(4):
            stack = DATA.stack if (host, local) == ("a", 2) else DP_SUM.stack
            dumps.append(pyspy_text(stack, 100 + local, command=f"python train.py --local_rank={local}"))
        text += [f"{host}: {line}" for line in "\n".join(dumps).splitlines()]
    (tmp_path / "all.txt").write_text("\n".join(text) + "\n")
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == (6,) and not any("--node_rank" in note for note in verdict.notes)
    (tmp_path / "all.txt").write_text("\n".join(line for line in text if "--nnodes" not in line) + "\n")
    assert any("order of their names, as no --node_rank" in note for note in diagnose_hang(tmp_path).notes)


def test_heartbeats_that_go_on_show_that_the_job_does(tmp_path: Path) -> None:
    """Two moments of a job that runs may show one stack by chance."""
    for moment, step in enumerate((205, 222)):
        write_all(tmp_path / f"t{moment}", dict.fromkeys(range(8), DP_SUM.stack) | {5: DATA.stack})
        ranks = [{"rank": r, "tp": 0, "pp": 0, "dp": r, "host": "a", "step": step} for r in range(8)]
        topology(tmp_path / f"t{moment}", 1, 1, 8, ranks=ranks)
    verdict = diagnose_hang(tmp_path)
    assert verdict.suspects == () and "Every rank moved" in verdict.paragraph
    topology(tmp_path / "t0", 1, 1, 8, ranks=ranks)
    assert diagnose_hang(tmp_path).suspects == (5,)
