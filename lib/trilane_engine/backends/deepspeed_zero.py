"""The `deepspeed-zero` engine, ZeRO 1 to 3 around megatron-core's GPT, and what all DeepSpeed
engines share.

ZeRO 1 and 2, and BF16_Optimizer, lay the parameters of a group end to end and cut that into dp
parts; a parameter's fragment is its share in this rank's part. Stage 3 cuts each separately.
"""

import contextlib
import io
import os
import warnings
from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import logger, safe_get_full_fp32_param, safe_get_full_optimizer_state
from megatron.core import parallel_state
from torch import Tensor

from trilane.interop.deepspeed_config import deepspeed_config
from trilane.workspace.fingerprints import must_decay
from trilane_engine import patches
from trilane_engine.backends.base import (
    Engine,
    Microbatch,
    Named,
    Step,
    init_moments,
    pieces,
    set_step,
    step_of,
)
from trilane_engine.model.fused import apply
from trilane_engine.model.gpt import (
    canonical_parameters,
    empty_chunk,
    fill_parameters,
    sum_over_tp,
    transformer_config,
)
from trilane_engine.phases import BACKWARD, FORWARD, OPTIMIZER, REDUCE, phase


class DeepSpeed(Engine):
    """An engine of DeepSpeed: `_initialize` makes the model, wraps it as `_engine`, and returns its
    parameters.
    """

    _engine: Any

    def _build(self) -> None:
        start()
        offloads = self._plan.topology.offload != "none"
        # only for offload DeepSpeed's Adam, on the host 5 to 7 times as fast as torch's: it is
        # compiled at start-up
        ds_config = deepspeed_config(self._plan, compiler=offloads and torch.cuda.is_available())
        self.settings["ds_config.json"] = ds_config
        with contextlib.redirect_stdout(io.StringIO()):  # DeepSpeed's errors are exceptions
            named = self._initialize(ds_config)
        self._optimizer = self._engine.optimizer
        self.states = DeepSpeedStates(named, self._optimizer, self._plan.topology.zero)

    def _initialize(self, ds_config: dict[str, Any]) -> Named:
        raise NotImplementedError

    def _wrap(
        self, model: torch.nn.Module, named: Named, ds_config: dict[str, Any], **options: Any
    ) -> None:
        """Give the model, in its initial state, DeepSpeed's engine."""
        for _, parameter in named:
            # Held whole, but applied to a part of the sequence. megatron-core sums once an
            # iteration; DeepSpeed puts a gradient into its buckets as soon as it exists, so a hook
            # sums it before, once a microbatch.
            if getattr(parameter, "sequence_parallel", False):
                parameter.register_hook(sum_over_tp)
        matrices = [parameter for name, parameter in named if must_decay(name)]
        others = [parameter for name, parameter in named if not must_decay(name)]
        groups = [
            {"params": matrices, "weight_decay": self._plan.optimizer.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        self._engine, *_ = deepspeed.initialize(
            model=model, config=ds_config, model_parameters=groups, **options
        )
        self.modules = [model]

    def _step(self, microbatches: Sequence[Microbatch]) -> Step:
        """One iteration: DeepSpeed sums the gradients of the microbatches and updates after the
        last of them.
        """
        count = len(microbatches)
        if count != self._engine.gradient_accumulation_steps():  # it grows with the batch
            each = self._plan.topology.mbs * self._engine.dp_world_size
            self._engine.set_train_batch_size(count * each)
        scale = 1.0
        if self._plan.topology.precision == "fp16":
            scale = float(self._optimizer.loss_scale)
        loss = self._train(microbatches)
        return Step(
            loss=loss,
            grad_norm=float(self._engine.get_global_grad_norm() or 0.0),
            loss_scale=scale,
            skipped=not self._engine.was_step_applied(),
        )

    def _train(self, microbatches: Sequence[Microbatch]) -> float:
        """Train one batch; its mean loss."""
        raise NotImplementedError

    def _mark_phases(self) -> None:
        """Make each of DeepSpeed's methods a phase from now on; ZeRO 2 and 3 also reduce inside
        backward.
        """
        phases = {"forward": FORWARD, "backward": BACKWARD}
        phases |= {"allreduce_gradients": REDUCE, "step": OPTIMIZER}
        for name, during in phases.items():
            setattr(self._engine, name, phase(during)(getattr(self._engine, name)))


class DeepSpeedZero(DeepSpeed):
    """TP and ZeRO of one plan."""

    def _initialize(self, ds_config: dict[str, Any]) -> Named:
        plan = self._plan
        with contextlib.ExitStack() as stack:
            if plan.topology.zero == 3:  # no rank ever holds more than its share
                replicas = parallel_state.get_data_parallel_group()
                sharded = deepspeed.zero.Init(
                    config_dict_or_path=ds_config, data_parallel_group=replicas, mpu=Mpu
                )
                stack.enter_context(sharded)
            model = empty_chunk(plan, apply(self._kernels, transformer_config(plan)))
        named = list(canonical_parameters(model, plan.shape.tied_embeddings))
        fill_parameters(named, plan)
        self._wrap(model, named, ds_config, mpu=Mpu)
        self._mark_phases()
        return named

    def _train(self, microbatches: Sequence[Microbatch]) -> float:
        losses = []
        for number, batch in enumerate(microbatches, 1):
            # DeepSpeed counts microbatches since the start of the run, which is wrong once the
            # batch has grown.
            self._engine.set_gradient_accumulation_boundary(number == len(microbatches))
            loss = self._loss(batch)
            self._engine.backward(loss)
            losses.append(loss.detach())
            self._engine.step()
        return self._mean(losses)

    def _evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        return self._mean([self._loss(batch) for batch in microbatches])

    def _loss(self, batch: Microbatch) -> Tensor:
        return self._engine(batch.tokens, self._positions, None, labels=batch.labels).float().mean()


build = DeepSpeedZero


class Mpu:
    """DeepSpeed's interface to tensor parallelism, implemented by megatron-core; the class is
    passed itself.
    """

    get_model_parallel_world_size = parallel_state.get_tensor_model_parallel_world_size
    get_model_parallel_rank = parallel_state.get_tensor_model_parallel_rank
    get_model_parallel_group = parallel_state.get_tensor_model_parallel_group
    get_data_parallel_world_size = parallel_state.get_data_parallel_world_size
    get_data_parallel_rank = parallel_state.get_data_parallel_rank
    get_data_parallel_group = parallel_state.get_data_parallel_group


def start() -> None:
    """Initialize DeepSpeed's communication over the existing process group, without compiling or
    printing anything.
    """
    logger.setLevel("ERROR")
    # Over gloo its pipeline passes activations on by broadcasts into tensors that require
    # gradients; torch never differentiates these broadcasts, and the gradients that DeepSpeed sends
    # back are right.
    warnings.filterwarnings(
        "ignore", message="c10d::broadcast_: an autograd kernel was not registered"
    )
    if torch.cuda.is_available():
        # its engines take LOCAL_RANK for the number of the card, which is 0 where a task sees one
        # card alone
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    else:
        patches.use_cpu()
    patches.import_compiler()
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)


# What an optimizer updates: the flat parts of stages 1 and 2, of BF16_Optimizer, of stage 3.
FLAT = (
    "single_partition_of_fp32_groups",
    "fp32_groups_flat_partition",
    "fp32_partitioned_groups_flat",
)


class DeepSpeedStates:
    """`named` parameters in the optimizer that deepspeed.initialize() returned."""

    divided = True

    def __init__(self, named: Named, optimizer: Any, stage: int) -> None:
        self.pieces = pieces(named)
        self._parameters: list[Any] = [parameter for _, parameter in named]
        self._optimizer = optimizer
        self._stage = stage
        self._started = False
        self._inner = [optimizer.optimizer]
        scaler: Any = getattr(optimizer, "loss_scaler", None)
        self._scaler = scaler if getattr(scaler, "dynamic", False) else None  # of fp16

    def finish_step(self) -> None:
        """Nothing is deferred; the moments exist from the first step on, here already before."""
        if self._started:
            return
        self._started = True
        flat = next(name for name in FLAT if hasattr(self._optimizer, name))
        init_moments(self._inner[0], getattr(self._optimizer, flat))
        if self._stage < 3:
            patches.link_moments(self._optimizer)

    def shard(self, number: int) -> tuple[int, int]:
        parameter = self._parameters[number]
        if self._stage == 3:
            each = parameter.ds_tensor.ds_numel
            first = each * dist.get_rank(parameter.ds_process_group)
            if first >= parameter.ds_numel:
                return 0, 0
            return first, min(first + each, parameter.ds_numel)
        fragment = patches.fragment(parameter)
        if not fragment:
            return 0, 0
        part = fragment.lp_fragment_address
        return part.start, part.start + part.numel

    def read(self, number: int, kind: str) -> Tensor:
        self.finish_step()
        parameter = self._parameters[number]
        key = None if kind == "weight" else kind
        if self._stage == 3:
            first, end = self.shard(number)
            return patches.partition(parameter, key).detach().view(-1)[: end - first]
        fragment = patches.fragment(parameter)
        if not fragment:
            return torch.empty(0)
        return fragment.get_hp_fragment(key).detach().view(-1)

    def gathered(self, number: int, kind: str) -> Tensor:
        """All of the piece, in its shape, gathered over the replicas; collective."""
        self.finish_step()
        parameter = self._parameters[number]
        if kind == "weight":
            whole = safe_get_full_fp32_param(parameter)
        else:
            whole = safe_get_full_optimizer_state(parameter, kind)
        return whole.view(self.pieces[number].size)

    def write(self, number: int, weight: Tensor, moments: dict[str, Tensor]) -> None:
        parameter = self._parameters[number]
        first, end = self.shard(number)
        with torch.no_grad():
            for kind, values in {"weight": weight.reshape(-1)[first:end], **moments}.items():
                self.read(number, kind).copy_(values)
            # Every replica writes the same values; modifier_rank, a rank among the replicas,
            # decides whose are kept.
            with deepspeed.zero.GatheredParameters(
                [parameter], modifier_rank=0, enabled=self._stage == 3
            ):
                parameter.copy_(weight.view(tuple(getattr(parameter, "ds_shape", parameter.shape))))

    def copy(self, number: int) -> Tensor | None:
        if self._stage == 3:  # no rank holds the whole of it
            return None
        return self._parameters[number].detach().view(self.pieces[number].size)

    def decays(self) -> list[float | None]:
        # of the two groups that _wrap() makes
        matrices, others = [group["weight_decay"] for group in self._optimizer.param_groups]
        return [matrices if must_decay(piece.name) else others for piece in self.pieces]

    def scalars(self) -> dict[str, float]:
        values = {"step": step_of(self._inner)}
        scaler = self._scaler
        if scaler:
            values["loss_scale"] = float(scaler.cur_scale)
            values["good_steps"] = scaler.cur_iter - scaler.last_overflow_iter - 1
            values["hysteresis"] = scaler.cur_hysteresis
        return values

    def set_scalars(self, values: dict[str, float]) -> None:
        set_step(self._inner, values["step"])
        scaler = self._scaler
        if scaler and "loss_scale" in values:
            scaler.cur_scale = values["loss_scale"]
            scaler.cur_hysteresis = int(values["hysteresis"])
            scaler.cur_iter = int(values["good_steps"])
            scaler.last_overflow_iter = -1
