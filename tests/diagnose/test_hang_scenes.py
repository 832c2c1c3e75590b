"""Hangs whose culprits are known, in the frames of Megatron-LM, megatron-core 0.16.1 and DeepSpeed 0.19.8.

No verdict may name ranks that are not to blame: where stacks cannot show which rank is, the verdict must state it.
Functions and files are those of the programs' own source (github.com/NVIDIA/Megatron-LM,
github.com/deepspeedai/DeepSpeed), lines partly so; hooks of parameters stand in an
unnamed thread of their own, as autograd's thread for a GPU has them.
"""

import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest
from dumps import faulthandler_text, pyspy_text, topology
from job import Stack

from trilane.diagnose.hang.tracebacks import read_faults
from trilane.diagnose.hang.verdict import diagnose_hang

FOLDERS = {"M": "megatron/core", "T": "megatron/training", "D": "deepspeed/runtime"}


def stack(text: str) -> Stack:
    """`function file:line < function file:line`, innermost first."""
    parts = [part.split() for part in text.split(" < ")]
    return tuple((name, *_place(place)) for name, place in parts)


def _place(place: str) -> tuple[str, int]:
    file, _, line = place.partition(":")
    folder, _, rest = file.partition("/")
    return f"{FOLDERS.get(folder, folder)}/{rest}" if rest else file, int(line)


C10D = "torch/distributed/distributed_c10d.py:3252 < wrapper torch/distributed/c10d_logger.py:83"
COMM = f"{C10D} < {{0}} deepspeed/comm/torch.py:290 < {{0}} deepspeed/comm/comm.py:710"
TOP = "pretrain T/training.py:1120 < <module> pretrain_gpt.py:290"
TRAIN = f"train T/training.py:2450 < {TOP}"
PIPE = "forward_backward_pipelining_without_interleaving M/pipeline_parallel/schedules.py"
STEP = f"train_step T/training.py:1480 < {TRAIN}"
NONPP = f"forward_backward_no_pipelining M/pipeline_parallel/schedules.py:620 < {STEP}"
M_BACK = (
    "custom_backward M/pipeline_parallel/schedules.py:189 < backward_step "
    f"M/pipeline_parallel/schedules.py:487 < {NONPP}"
)
M_HOOK = "hook M/distributed/distributed_data_parallel.py:444"
BUCKETS = "M/distributed/param_and_grad_buffer.py"
READY = f"start_grad_sync {BUCKETS}:455 < register_grad_ready {BUCKETS}:579 < {M_HOOK}"
SUM = f"all_reduce {C10D}"
FINISH = (
    f"finish_grad_sync {BUCKETS}:{{0}} < finish_grad_sync M/distributed/distributed_data_parallel.py:545 < "
    f"finalize_model_grads M/distributed/finalize_model_grads.py:443 < {NONPP}"
)
LAYER = (
    "forward M/transformer/transformer_layer.py:500 < forward "
    "M/transformer/transformer_block.py:700 < forward_step M/pipeline_parallel/schedules.py:400"
)
TP_SUM = f"{SUM} < _reduce M/tensor_parallel/mappings.py:31 < forward M/tensor_parallel/mappings.py:232"
ATTENTION = f"{TP_SUM} < forward M/transformer/attention.py:990 < {LAYER}"
MLP = f"{TP_SUM} < forward M/transformer/mlp.py:240 < {LAYER}"
RECV = (
    "wait torch/distributed/distributed_c10d.py:520 < _communicate M/pipeline_parallel/p2p_communication.py"
    ":392 < {0} M/pipeline_parallel/p2p_communication.py:{1}"
)
EVALUATE = f"evaluate T/training.py:3000 < evaluate_and_print_results T/training.py:3200 < {TRAIN}"
NORM = (
    f"{SUM} < get_grad_norm_fp32 M/optimizer/clip_grads.py:130 < step M/optimizer/optimizer.py:600"
    f" < train_step T/training.py:1530 < {TRAIN}"
)
BARRIER = "barrier torch/distributed/distributed_c10d.py:5200 < wrapper torch/distributed/c10d_logger.py:83"
SAVE = f"save_checkpoint T/checkpointing.py:{{0}} < save_checkpoint_and_time T/training.py:2100 < {TRAIN}"

DS_TOP = "main train.py:88 < <module> train.py:120"
DS_STEP = f"train_batch train.py:60 < {DS_TOP}"
DS_BACK = (
    "_engine_run_backward torch/autograd/graph.py:979 < backward torch/autograd/__init__.py:395 < backward "
    f"torch/_tensor.py:623 < backward D/engine.py:3428 < {DS_STEP}"
)
Z = "D/zero/stage_1_and_2.py"
DS_HOOK = (
    f"reduce_independent_p_g_buckets_and_remove_grads {Z}:1440 < reduce_ready_partitions_and_remove_grads {Z}:2295 < "
    f"process_gradients {Z}:2291 < grad_handling_hook {Z}:1372"
)
DS_SUM = (
    f"all_reduce {COMM.format('all_reduce')} < allreduce_bucket {Z}:2384 < allreduce_and_copy {Z}:2430 < "
    f"average_tensor {Z}:1690 < reduce_ipg_grads {Z}:2240 < {DS_HOOK}"
)
Z3 = "D/zero/stage3.py"
DS3_HOOK = f"reduce_ready_partitions_and_remove_grads {Z3}:1800 < reduce_partition_and_remove_grads {Z3}:1514"
DS3_SUM = (
    f"reduce_scatter_tensor {COMM.format('reduce_scatter_tensor')} < reduce_scatter_coalesced "
    f"D/comm/coalesced_collectives.py:120 < __avg_scatter_grads {Z3}:1460 < "
    f"__reduce_and_partition_ipg_grads {Z3}:1410 < {DS3_HOOK}"
)
GATHER = (
    f"all_gather_into_tensor {COMM.format('all_gather_into_tensor')} < all_gather_coalesced "
    "D/zero/partition_parameters.py:1250 < __all_gather_params_ "
    "D/zero/partitioned_param_coordinator.py:470 < fetch_sub_module "
    "D/zero/partitioned_param_coordinator.py:320 < pre_sub_module_forward_function "
    "D/zero/parameter_offload.py:480"
)
DS_FORWARD = f"forward model.py:77 < forward D/engine.py:2100 < {DS_STEP}"
OVERFLOW = (
    f"all_reduce {COMM.format('all_reduce')} < has_overflow {Z}:3242 < step {Z}:2800 < _take_model_step "
    f"D/engine.py:3600 < step D/engine.py:3700 < {DS_STEP}"
)
P_TOP = f"_exec_schedule D/pipe/engine.py:1387 < train_batch D/pipe/engine.py:370 < {DS_TOP}"
P_RECV = f"recv {COMM.format('recv')} < recv D/pipe/p2p.py:79 < {{0}} D/pipe/engine.py:{{1}} < {P_TOP}"

Place = str | tuple[str, str]  # the main thread, or it and a thread of autograd


@dataclass(frozen=True)
class Scene:
    """What hangs: tp, pp, dp, the stack of most ranks, that of others, and who is to blame.

    `unknown`: stacks cannot show it, so that nobody may be named.
    """

    sizes: tuple[int, int, int]
    usual: Place
    others: dict[int, Place | None]
    guilty: frozenset[int]
    unknown: bool = False
    states: tuple[tuple[int, str], ...] = ()


def culprits(
    sizes: tuple[int, int, int], usual: Place, others: dict[int, Place | None], *guilty: int, **more: object
) -> Scene:
    return Scene(sizes, usual, others, frozenset(guilty or others), **more)  # type: ignore[arg-type]


IN_HOOK = (DS_BACK, DS_SUM)
WAITS = f"wait torch/distributed/distributed_c10d.py:2500 < {FINISH.format(536)}"
SCENES = {
    "Megatron: a rank's hook of another parameter computes": culprits(
        (1, 1, 8), WAITS, {3: (M_BACK, f"{M_HOOK}".replace(":444", ":437"))}
    ),
    "Megatron: a rank is in the hook's all-reduce, the others sum after backward": culprits(
        (1, 1, 8), f"{SUM} < start_grad_sync {BUCKETS}:455 < {FINISH.format(519)}", {6: (M_BACK, f"{SUM} < {READY}")}
    ),
    "Megatron: hooks sum over dp, a rank is in its forward pass": culprits(
        (1, 1, 4), (M_BACK, f"{SUM} < {READY}"), {2: f"linear torch/nn/functional.py:2300 < {LAYER} < {NONPP}"}
    ),
    "Megatron: tensor ranks in two collectives of the forward pass": culprits(
        (4, 1, 2), f"{ATTENTION} < {NONPP}", {1: f"{MLP} < {NONPP}"}
    ),
    "DeepSpeed ZeRO-2: a rank computes in another hook": culprits(
        (1, 1, 8), IN_HOOK, {5: (DS_BACK, f"get_gradient_for_reduction {Z}:1450 < {DS_HOOK}")}
    ),
    "DeepSpeed ZeRO-2: a rank is at its overflow check": culprits((1, 1, 8), IN_HOOK, {7: OVERFLOW}),
    "DeepSpeed ZeRO-3: hooks scatter, a rank gathers for its forward pass": culprits(
        (1, 1, 8), (DS_BACK, DS3_SUM), {0: f"{GATHER} < {DS_FORWARD}"}
    ),
    "DeepSpeed ZeRO-3: a rank evaluates while all others train": culprits(
        (1, 1, 8),
        f"{GATHER} < {DS_FORWARD}",
        {4: f"{GATHER} < forward model.py:77 < forward D/engine.py:2100 < evaluate train.py:75 < {DS_TOP}"},
    ),
    "DeepSpeed pipeline: a stage never gets its activations": culprits(
        (1, 4, 1),
        P_RECV.format("_exec_recv_grads", 1216),
        {
            1: f"randn model.py:30 < _exec_forward_pass D/pipe/engine.py:730 < {P_TOP}",
            2: P_RECV.format("_exec_recv_activations", 1141),
            3: P_RECV.format("_exec_recv_activations", 1141),
        },
        1,
    ),
    "Megatron pipeline: the first stage waits for data": culprits(
        (1, 4, 2),
        f"{RECV.format('recv_forward', 428)} < {PIPE}:2100 < {STEP}",
        {
            0: f"poll multiprocessing/connection.py:257 < _try_get_data torch/utils/data/dataloader.py:1243 < __next__ "
            f"torch/utils/data/dataloader.py:734 < get_batch pretrain_gpt.py:60 < "
            f"forward_step pretrain_gpt.py:180 < {PIPE}"
            f":2120 < {STEP}",
            1: f"{SUM} < start_grad_sync {BUCKETS}:455 < {FINISH.format(519)}",
            3: f"{SUM} < start_grad_sync {BUCKETS}:455 < {FINISH.format(519)}",
            5: f"{SUM} < start_grad_sync {BUCKETS}:455 < {FINISH.format(519)}",
            7: f"{SUM} < start_grad_sync {BUCKETS}:455 < {FINISH.format(519)}",
        },
        0,
    ),
    "Megatron: the embedding's last stage is not in the tied all-reduce": culprits(
        (1, 2, 2),
        f"{SUM} < _allreduce_embedding_grad M/distributed/finalize_model_grads.py:258 < finalize_model_grads "
        f"M/distributed/finalize_model_grads.py:470 < {PIPE}:2400 < {STEP}",
        {3: f"item model.py:9 < finalize_model_grads M/distributed/finalize_model_grads.py:450 < {PIPE}:2400 < {STEP}"},
    ),
    "a rank waits for its data loader": culprits(
        (2, 1, 4),
        f"{NORM}",
        {
            5: f"read indexed_dataset.py:312 < __getitem__ M/datasets/gpt_dataset.py:190 < "
            f"get_batch pretrain_gpt.py:60 < {NONPP}"
        },
    ),
    "a rank's tensor neighbour waits for the batch that its data loader does not give": culprits(
        (2, 2, 2),
        f"{SUM} < start_grad_sync {BUCKETS}:455 < {FINISH.format(519)}",
        {
            2: f"read indexed_dataset.py:312 < __getitem__ M/datasets/gpt_dataset.py:190 < "
            f"get_batch pretrain_gpt.py:60 < {NONPP}",
            3: f"broadcast {C10D} < fetch my_data.py:12 < get_batch pretrain_gpt.py:62 < {NONPP}",
        },
        2,
    ),
    "a rank still writes its checkpoint": culprits(
        (2, 2, 2), f"{BARRIER} < {SAVE.format(620)}", {2: f"save torch/serialization.py:850 < {SAVE.format(560)}"}
    ),
    "a rank waits for a file lock of the file system (state D)": culprits(
        (1, 1, 8),
        f"{BARRIER} < {SAVE.format(620)}",
        {1: f"open fsspec/spec.py:1300 < {SAVE.format(540)}"},
        states=((1, "D"),),
    ),
    "a rank is gone": culprits((1, 1, 8), IN_HOOK, {6: None}, states=((6, "gone"),)),
    "a rank without a dump": culprits((1, 1, 8), IN_HOOK, {6: None}),
    "a kernel does not end on one rank, and the queues of all are full": culprits(
        (1, 1, 8), f"synchronize torch/cuda/__init__.py:1209 < step train.py:70 < {DS_TOP}", {}, 3, unknown=True
    ),
    "one rank in another bucket of the same hook": culprits((1, 1, 8), IN_HOOK, {}, 2, unknown=True),
    "a rank did not join the new communicator": culprits(
        (1, 1, 8),
        "new_group torch/distributed/distributed_c10d.py:5400 < wrapper torch/distributed/c10d_logger.py:95 < "
        "initialize_model_parallel M/parallel_state.py:800 < _initialize_distributed "
        f"T/initialize.py:390 < initialize_megatron T/initialize.py:100 < {TOP}",
        {4: f"_compile_dependencies T/initialize.py:170 < initialize_megatron T/initialize.py:90 < {TOP}"},
    ),
    "a rank at a barrier that the others do not have": culprits(
        (1, 1, 8), IN_HOOK, {3: f"{BARRIER} < log_metrics train.py:41 < {DS_TOP}"}
    ),
    "collectives of tp and dp in another order on one rank": culprits(
        (2, 1, 4),
        f"{ATTENTION} < {NONPP}",
        {5: f"{SUM} < average_losses_across_data_parallel_group T/utils.py:90 < {NONPP}"},
    ),
    "some ranks evaluate": culprits(
        (2, 1, 4),
        f"{SUM} < start_grad_sync {BUCKETS}:455 < {FINISH.format(519)}",
        {rank: f"{SUM} < {EVALUATE}" for rank in (2, 3)},
    ),
    "an exception's handler waits at a barrier": culprits(
        (1, 1, 8), (DS_BACK, DS3_SUM), {1: f"{BARRIER} < on_exception train.py:99 < {DS_TOP}"}
    ),
    "a rank collects garbage": culprits((1, 1, 8), WAITS, {0: f"collect_garbage T/training.py:2390 < {TRAIN}"}),
    "a rank compiles": culprits(
        (1, 1, 8),
        f"{GATHER} < {DS_FORWARD}",
        {7: f"wait concurrent/futures/_base.py:320 < compile_fx torch/_inductor/compile_fx.py:1400 < {DS_FORWARD}"},
    ),
    "a rank's tokenizer waits for a lock": culprits(
        (1, 1, 8),
        IN_HOOK,
        {2: f"encode tokenizers/__init__.py:88 < __getitem__ dataset.py:20 < next_batch train.py:30 < {DS_TOP}"},
    ),
    "the network": culprits((2, 2, 2), NORM, {}, unknown=True),
}


def write(folder: Path, scene: Scene, style: str) -> None:
    tp, pp, dp = scene.sizes
    for rank in range(tp * pp * dp):
        place = scene.others.get(rank, scene.usual)
        if place is not None:
            main, *hooks = (place,) if isinstance(place, str) else place
            if style == "text":
                text = pyspy_text(stack(main), 100 + rank) + "".join(_unnamed(stack(hook)) for hook in hooks)
            else:
                more = "".join(faulthandler_text(stack(hook), "Thread").split("\n\n")[1] + "\n\n" for hook in hooks)
                text = more.replace("40a1b2c740", "40deadbe40") + faulthandler_text(stack(main))
            (folder / f"rank_{rank}.txt").write_text(text)
    topology(folder, tp, pp, dp, ranks=[{"rank": rank, "state": state} for rank, state in scene.states])


def _unnamed(frames: Iterable[tuple[str, str, int]]) -> str:
    """A thread that C++ started, as py-spy writes it."""
    return "Thread 8287 (active)\n" + "".join(f"    {f} ({file}:{line})\n" for f, file, line in frames)


@pytest.mark.parametrize("style", ["text", "faults"])
@pytest.mark.parametrize("name", SCENES)
def test_who_is_to_blame_is_named_or_it_is_said_that_stacks_cannot_show_it(
    name: str, style: str, tmp_path: Path
) -> None:
    scene = SCENES[name]
    write(tmp_path, scene, style)
    verdict = diagnose_hang(tmp_path)
    named = frozenset(verdict.suspects)
    if scene.unknown:
        assert not named and "cannot be determined from" in verdict.paragraph
    else:
        assert named == (scene.guilty), verdict.to_text()
        assert all("state D" in verdict.reasons[rank] for rank, state in scene.states if state == "D")


# A backward pass within 60 others runs in a thread that C++ starts, as each of them does for a GPU.
NESTED = """
import faulthandler, os, sys
import torch

class Nested(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, depth):
        ctx.depth = depth
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = torch.ones(1, requires_grad=True)
            Nested.apply(x, ctx.depth - 1).backward() if ctx.depth else train()
        return gradient, None

def register_grad_ready(weight):
    faulthandler.dump_traceback(sys.stdout)
    sys.stdout.flush()
    os._exit(0)

def train():
    weight = torch.ones(1, requires_grad=True)
    weight.register_post_accumulate_grad_hook(register_grad_ready)
    (2 * weight).sum().backward()

Nested.apply(torch.ones(1, requires_grad=True), 60).backward()
"""


@pytest.mark.slow
def test_a_hook_that_really_runs_in_a_thread_of_autograd_is_on_top_of_the_main_threads_backward() -> None:
    done = subprocess.run([sys.executable, "-c", NESTED], capture_output=True, text=True, check=True)
    dump = read_faults(done.stdout)
    assert len(dump.threads) == 2 and len(dump.threads[0].frames) == 1  # the hook alone, of its thread
    assert [f.function for f in dump.main.frames[:3]] == ["register_grad_ready", "_engine_run_backward", "backward"]
