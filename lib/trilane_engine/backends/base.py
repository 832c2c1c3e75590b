"""What all engines share: the interface that the loop sees, their start, and the inside of an
optimizer of any make.
"""

import importlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from trilane.config.plan import Plan
from trilane.utils.frozen import frozen
from trilane_engine import patches
from trilane_engine.model import fused
from trilane_engine.model.experts import tensor_parallel
from trilane_engine.model.parameters import Piece, paired
from trilane_engine.model.rng import seed_streams
from trilane_engine.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")
Named = Sequence[tuple[str, torch.nn.Parameter]]  # parameters by their names in the whole model


@frozen
class Microbatch:
    """Tokens and the tokens that follow them, both (mbs, seq_length), int64, on this
    rank's device.
    """

    tokens: Tensor
    labels: Tensor


@frozen
class Step:
    """Result of one iteration: mean loss in nats (0 on ranks without it), gradient norm before
    clipping; `imbalance`: tokens of the busiest expert over the mean, in the worst layer.
    """

    loss: float
    grad_norm: float
    loss_scale: float
    skipped: bool
    imbalance: float = 0.0


class States(Protocol):
    """Weights and optimizer of one rank, piece by piece in fp32, whatever the engine's own
    representation.

    A piece is the same on all replicas. Of its values, flattened, a rank reads those of
    `shard(number)`: where the states are `divided` (ZeRO, a distributed optimizer) the part that it
    updates itself, as no other replica of its instance does; else all of them. All replicas must
    read the same pieces in the same order, since an engine may have to gather them.

        finish_step   complete what the last step deferred; collective, before any read
        shard         (first, last + 1) of the values that read() returns; (0, 0) for none
        read          these values of a piece of `kind` (checkpoints.KINDS), flat, fp32; the next
                      step may change them
        write         set a piece: the whole `weight`, also in the engine's precision, and `moments`
                      as read() has them
        copy          the weight that the model computes with; None where it is the optimizer's own,
                      or not here whole
        decays        current weight decay of each piece's optimizer group; None where this rank
                      updates none of it
        scalars       Adam's step; in fp16 also loss_scale, good_steps since it last changed, and
                      hysteresis
        set_scalars   after the pieces; the loss scale starts afresh where the checkpoint's
                      precision had none
    """

    pieces: list[Piece]
    divided: bool

    def finish_step(self) -> None: ...
    def shard(self, number: int) -> tuple[int, int]: ...
    def read(self, number: int, kind: str) -> Tensor: ...
    def write(self, number: int, weight: Tensor, moments: dict[str, Tensor]) -> None: ...
    def copy(self, number: int) -> Tensor | None: ...
    def decays(self) -> list[float | None]: ...
    def scalars(self) -> dict[str, float]: ...
    def set_scalars(self, values: dict[str, float]) -> None: ...


def pieces(named: Named) -> list[Piece]:
    """This rank's pieces of parameters. What tensor parallelism does not split is written by its
    ranks in turn.
    """
    is_first_stage = parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    rank_pieces = []
    for number, (name, parameter) in enumerate(named):
        rank, tp = tensor_parallel(name)
        gated = getattr(parameter, "partition_stride", 1) == 2
        # under ZeRO-3 itself is empty
        whole = [*paired(getattr(parameter, "ds_shape", parameter.shape), gated)]
        box = [(0, n) for n in whole]
        is_split = tp > 1 and getattr(parameter, "tensor_model_parallel", False)
        if is_split:
            # of gate and up, (2, ffn, h), each rank has its rows of both
            dim = getattr(parameter, "partition_dim", 0) + gated
            box[dim] = (whole[dim] * rank, whole[dim] * (rank + 1))
            whole[dim] *= tp
        is_twin = name.startswith("embedding.") and not is_first_stage
        elsewhere = is_twin or (not is_split and number % tp != rank)
        piece = Piece(name=name, shape=tuple(whole), box=tuple(box), written_elsewhere=elsewhere)
        rank_pieces.append(piece)
    return rank_pieces


class Engine:
    """One system that trains the plan's GPT, from the initial state; collective over all ranks.

    modules     this rank's part of the model
    settings    file name -> JSON of the settings that the library received; written to the run
                folder
    states      weights and optimizer, for checkpoints to read and write
    path        whether its kernels are fused, why, and how attention is computed; for the log's
                first lines
    """

    modules: Sequence[torch.nn.Module]
    settings: dict[str, Any]
    states: States
    _optimizer: Any

    def __init__(self, plan: Plan, world: World) -> None:
        t = plan.topology
        # Its further gloo groups serve megatron-core's own checkpoints; 384 ranks would keep as
        # many TCP connections.
        parallel_state.initialize_model_parallel(
            t.tp,
            t.pp,
            virtual_pipeline_model_parallel_size=t.interleaving if t.interleaving > 1 else None,
            context_parallel_size=t.cp,
            expert_model_parallel_size=t.ep,
            expert_tensor_parallel_size=t.etp,
            num_distributed_optimizer_instances=t.instances,
            create_gloo_process_groups=False,
        )
        seed_streams(plan.run.seed)
        self._plan = plan
        self._kernels = fused.choose(plan, world)
        self.settings = {}
        self.path = str(self._kernels)
        positions = torch.arange(plan.shape.seq_length, device=world.device)
        self._positions = positions.expand(t.mbs, -1)  # (mbs, seq_length)
        self._build()
        if t.offload_checkpoints:
            for module in self.modules:
                patches.inputs_on_host(module)

    @property
    def replica(self) -> tuple[int, int]:
        """(index, number) of this rank's data-parallel replica."""
        return (
            parallel_state.get_data_parallel_rank(),
            parallel_state.get_data_parallel_world_size(),
        )

    def step(self, microbatches: Sequence[Microbatch], lr: float) -> Step:
        """Forward, backward and optimizer step over this replica's share of one global batch."""
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return self._step(microbatches)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        """Mean loss in nats of one global batch, of which this is the replica's share; 0 on ranks
        without it.

        Forward alone and without dropout: weights, optimizer and generators stay as they are.
        """
        for module in self.modules:
            module.eval()
        with torch.no_grad():
            loss = self._evaluate(microbatches)
        for module in self.modules:
            module.train()
        return loss

    def _build(self) -> None:
        """Set `modules`, `states`, `_optimizer`, and `settings` if there are any."""
        raise NotImplementedError

    def _step(self, microbatches: Sequence[Microbatch]) -> Step:
        raise NotImplementedError

    def _evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        raise NotImplementedError

    def _mean(self, losses: Sequence[Tensor]) -> float:
        """Mean over microbatches and replicas; 0 on stages that have no loss."""
        if not losses:
            return 0.0
        mean = torch.stack(list(losses)).mean()
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(mean, group=group)
        return mean.item() / group.size()


def build(plan: Plan, world: World) -> Engine:
    """The plan's engine with its model in the initial state; its module in this package calls the
    class `build`.
    """
    module = importlib.import_module(f"trilane_engine.backends.{plan.engine.replace('-', '_')}")
    return module.build(plan, world)


def init_moments(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor]) -> None:
    """Give each of the optimizer's parameters without moments those of step 0: zeros, as the first
    step would.
    """
    for parameter in parameters:
        state = optimizer.state[parameter]
        if "exp_avg" not in state:
            state["step"] = _step(optimizer, 0.0, parameter)
            state |= {kind: torch.zeros_like(parameter, dtype=torch.float32) for kind in MOMENTS}


def step_of(optimizers: Iterable[torch.optim.Optimizer]) -> float:
    """Steps taken, the same for all parameters; 0 where this rank updates none."""
    most = 0.0
    for optimizer in optimizers:
        for counts in optimizer.state.values():
            most = max(most, float(counts.get("step", 0)))
    return most


def set_step(optimizers: Iterable[torch.optim.Optimizer], step: float) -> None:
    """Set the number of steps taken to `step`."""
    for optimizer in optimizers:
        for parameter, counts in optimizer.state.items():
            counts["step"] = _step(optimizer, step, parameter)


def _step(optimizer: torch.optim.Optimizer, step: float, parameter: Tensor) -> Any:
    """torch counts in a tensor, the fused one on the parameter's device; the other optimizers in an
    int.
    """
    if not isinstance(optimizer, torch.optim.Adam):  # AdamW is one of them
        return int(step)
    fused_adam = any(group.get("fused") for group in optimizer.param_groups)
    return torch.tensor(step, dtype=torch.float32, device=parameter.device if fused_adam else None)
