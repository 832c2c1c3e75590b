"""A job of many ranks in small: each runs its list of operations until it waits, so that a plant
has its real victims.

The operations and stacks are those of a Megatron + DeepSpeed pipeline; lines are made up. Sends do
not wait.
"""

from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from trilane.workspace.rank_grid import Grid, regular

# (function, file, line), innermost first
Stack = tuple[tuple[str, str, int], ...]
ROOT: Stack = (
    ("train", "megatron/training.py", 851),
    ("pretrain", "megatron/training.py", 187),
    ("<module>", "pretrain_gpt.py", 239),
)
STEP: Stack = (("train_step", "megatron/training.py", 436), *ROOT)
BATCH: Stack = (("train_batch", "deepspeed/runtime/pipe/engine.py", 330), *STEP)
FORWARD: Stack = (
    ("forward", "megatron/model/transformer.py", 610),
    ("_call_impl", "torch/nn/modules/module.py", 1110),
    ("_exec_forward_pass", "deepspeed/runtime/pipe/engine.py", 640),
    *BATCH,
)
BACKWARD: Stack = (
    ("backward", "megatron/mpu/mappings.py", 96),
    ("apply", "torch/autograd/function.py", 253),
    ("run_backward", "torch/autograd/__init__.py", 173),
    ("_exec_backward_pass", "deepspeed/runtime/pipe/engine.py", 735),
    *BATCH,
)


def c10d(op: str) -> Stack:
    """The frames of torch for a collective."""
    lines = {
        "all_reduce": 1322,
        "broadcast": 1191,
        "recv": 1081,
        "barrier": 2776,
        "send": 1038,
        "all_to_all_single": 5140,
    }
    return (
        (op, "torch/distributed/distributed_c10d.py", lines[op]),
        ("wrapper", "torch/distributed/c10d_logger.py", 75),
    )


@dataclass(frozen=True)
class Op:
    """One operation: `kind` "work", "send", "recv" or a collective over `axis`; `name` is for
    plants to find it.
    """

    name: str
    kind: str
    axis: str
    stack: Stack


def operation(
    name: str, kind: str, axis: str, *callers: tuple[str, str, int], below: Stack = BATCH
) -> Op:
    inner = () if kind in ("work", "send") else c10d(kind)
    return Op(name, kind, axis, (*inner, *callers, *below))


P2P, MPU = "deepspeed/runtime/pipe/p2p.py", "megatron/mpu"
ENGINE = "deepspeed/runtime/pipe/engine.py"
DATA = operation(
    "data", "work", "", ("get_batch", "pretrain_gpt.py", 70), ("_load_micro_batch", ENGINE, 780)
)
SPREAD = operation(
    "spread",
    "broadcast",
    "tp",
    ("broadcast_data", f"{MPU}/data.py", 92),
    ("get_batch_pipe", "g.py", 5),
)
RECV_F = operation(
    "recv_forward", "recv", "previous", ("recv", P2P, 60), ("_exec_recv_activations", ENGINE, 900)
)
ATTENTION = operation(
    "attention", "all_reduce", "tp", ("_reduce", f"{MPU}/mappings.py", 30), below=FORWARD
)
MLP = operation("mlp", "work", "", ("gelu", "megatron/model/fused_bias_gelu.py", 44), below=FORWARD)
MLP_SUM = operation(
    "mlp_sum", "all_reduce", "tp", ("_reduce", f"{MPU}/mappings.py", 31), below=FORWARD
)
SEND_F = operation(
    "send_forward", "send", "next", ("send", P2P, 44), ("_exec_send_activations", ENGINE, 860)
)
RECV_B = operation(
    "recv_backward", "recv", "next", ("recv", P2P, 61), ("_exec_recv_grads", ENGINE, 940)
)
GRAD_SUM = operation(
    "grad_sum", "all_reduce", "tp", ("_reduce", f"{MPU}/mappings.py", 30), below=BACKWARD
)
SEND_B = operation(
    "send_backward", "send", "previous", ("send", P2P, 45), ("_exec_send_grads", ENGINE, 880)
)
TIED = operation(
    "tied",
    "all_reduce",
    "embedding",
    ("allreduce_tied_weight_gradients", "deepspeed/runtime/pipe/module.py", 420),
)
DP_SUM = operation(
    "dp_sum",
    "all_reduce",
    "dp",
    ("buffered_allreduce_fallback", "deepspeed/runtime/engine.py", 2270),
)
NORM = operation(
    "norm", "all_reduce", "model", ("get_grad_norm", "deepspeed/runtime/utils.py", 300)
)
ADAM = operation(
    "adam",
    "work",
    "",
    ("step", "apex/optimizers/fused_adam.py", 120),
    ("step", "bf16_optimizer.py", 240),
)
LOSS = operation("loss", "broadcast", "pp", ("_aggregate_total_loss", ENGINE, 540))
DONE = operation(
    "done", "all_reduce", "world", below=(("train", "megatron/training.py", 915), *ROOT[1:])
)


def program(grid: Grid, rank: int, microbatches: int = 3) -> list[Op]:
    """What a rank does in two iterations."""
    place, last = grid[rank], grid.stages - 1
    one: list[Op] = []
    for _ in range(microbatches):
        one += [DATA, SPREAD] if place.pp in (0, last) else []
        one += [RECV_F] if place.pp else []
        one += [ATTENTION, MLP, MLP_SUM] + ([SEND_F] if place.pp < last else [])
    for _ in range(microbatches):
        one += ([RECV_B] if place.pp < last else []) + [GRAD_SUM] + ([SEND_B] if place.pp else [])
    one += [TIED] if place.pp in (0, last) else []
    return [*one, DP_SUM, NORM, ADAM, LOSS, DONE] * 2


def first(ops: list[Op], name: str, occurrence: int = 1) -> int:
    """The index of an operation, of its `occurrence`-th."""
    return [i for i, op in enumerate(ops) if op.name == name][occurrence - 1]


def stand(
    grid: Grid, programs: dict[int, list[Op]], stuck: dict[int, int]
) -> dict[int, tuple[int, Op]]:
    """Where all ranks stand once nothing moves: the index of their operation, and it. `stuck` never
    leave theirs.
    """
    at = dict.fromkeys(programs, 0)
    sent: Counter[tuple[int, int, str]] = Counter()
    received: Counter[tuple[int, int, str]] = Counter()
    moved = True
    while moved:
        moved = False
        arrived: defaultdict[tuple[object, ...], list[int]] = defaultdict(list)
        for rank, ops in programs.items():
            while at[rank] < len(ops) and stuck.get(rank) != at[rank]:
                op = ops[at[rank]]
                if op.kind in ("send", "recv") and op.axis in ("next", "previous"):
                    (peer,) = grid.group(op.axis, rank) - {rank}
                    way = ("down" if op.axis == "next" else "up") if op.kind == "send" else None
                    if op.kind == "send":
                        sent[rank, peer, str(way)] += 1
                    else:
                        key = (peer, rank, "up" if op.axis == "next" else "down")
                        if received[key] >= sent[key]:
                            break
                        received[key] += 1
                elif op.kind != "work":
                    arrived[op.axis, op.kind, op.stack, grid.group(op.axis, rank)].append(rank)
                    break
                at[rank] += 1
                moved = True
        for (*_, group), ranks in arrived.items():
            if len(ranks) == len(group):
                moved = True
                for rank in ranks:
                    at[rank] += 1
    return {rank: (at[rank], ops[min(at[rank], len(ops) - 1)]) for rank, ops in programs.items()}


GRID = regular(8, 12, 4, 8)


def elsewhere(op: Op, *inner: tuple[str, str, int]) -> Op:
    """The operation with other frames on top, as of a rank that got stuck below it."""
    below = op.stack[2:] if op.kind not in ("work", "send") else op.stack
    return replace(op, stack=(*inner, *below))
