"""The `megatron` engine: megatron-core's schedules, DDP and optimizer, as Megatron-LM's own
training loop uses them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from trilane.config.plan import Plan
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
from trilane_engine.model import context, te
from trilane_engine.model.experts import Loads
from trilane_engine.model.fused import DTYPES, apply, compiled
from trilane_engine.model.gpt import (
    build_chunks,
    canonical_parameters,
    layer_spec,
    transformer_config,
)
from trilane_engine.model.own_layer import own_spec, try_out
from trilane_engine.phases import OPTIMIZER, megatron_timers, phase

LossOf = Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]


class Megatron(Engine):
    """TP, PP (1F1B, interleaved) and DP of one plan."""

    def _build(self) -> None:
        plan = self._plan
        t = plan.topology
        te.start(plan, self._positions.device)
        settings = apply(self._kernels, transformer_config(plan))
        if te.is_chosen(settings):
            self.path += "; Transformer Engine's layers"
        layer_of_plan = None
        if plan.layer:
            self.path += f"; layer {plan.layer}, of which no prediction knows"
            layer_of_plan = own_spec(plan, layer_spec(plan.shape, settings))
        named: list[tuple[str, nn.Parameter]] = []
        models = build_chunks(plan, settings, layer_of_plan)
        self._loads = Loads(models)
        for model in models:
            for layer in model.decoder.layers:
                if plan.layer:
                    try_out(plan, layer.to(settings.params_dtype))
                if plan.run.fused == "layer":
                    layer.forward = compiled(layer.forward)
            named += canonical_parameters(model, plan.shape.tied_embeddings)
        self._parameters: list[Any] = [parameter for _, parameter in named]
        self._chunks = [_distributed(model, settings, plan) for model in models]
        self.modules = self._chunks
        patches.use_torch_optimizer()
        self._optimizer = get_megatron_optimizer(
            _optimizer_config(plan), self._chunks, use_gloo_process_groups=False
        )
        for group in self._optimizer.param_groups:
            # As Megatron-LM's scheduler does; megatron-core only sets `wd_mult`: norms and biases
            # would decay.
            group["weight_decay"] = plan.optimizer.weight_decay * group["wd_mult"]
            if t.adam == "fused":  # reads and writes each state once
                group["fused"] = True
                group["foreach"] = False
        self.states = MegatronStates(named, self._optimizer.chained_optimizers, self._chunks)
        patches.send_aliases()
        settings.timers = megatron_timers(pipeline=t.pp > 1)
        settings.finalize_model_grads_func = finalize_model_grads
        settings.grad_scale_func = self._optimizer.scale_loss
        if t.overlap_grad_reduce:
            # Gradients are reduced as they arrive, in the last microbatch only.
            no_sync = [chunk.no_sync for chunk in self._chunks]
            settings.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self._schedule = get_forward_backward_func()

    def _step(self, microbatches: Sequence[Microbatch]) -> Step:
        self._zero_grad()
        scale = self._optimizer.get_loss_scale().item()
        losses = self._forward_backward(microbatches)
        with phase(OPTIMIZER):
            updated, grad_norm, _ = self._optimizer.step()
        return Step(
            loss=self._mean(losses),
            grad_norm=float(grad_norm or 0.0),
            loss_scale=scale,
            skipped=not updated,
            imbalance=self._loads.imbalance() if self._plan.shape.experts else 0.0,
        )

    def _zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        if not self._plan.topology.overlap_grad_reduce:
            for parameter in self._parameters:
                parameter.grad = parameter.main_grad

    def _evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        overlaps = self._plan.topology.overlap_param_gather
        if overlaps:  # gathers now what is left to the next forward pass
            for chunk in self._chunks:
                chunk.disable_forward_pre_hook()
        loss = self._mean(self._forward_backward(microbatches, forward_only=True))
        if overlaps:
            for chunk in self._chunks:
                chunk.enable_forward_pre_hook()
        return loss

    def _forward_backward(
        self, microbatches: Sequence[Microbatch], forward_only: bool = False
    ) -> list[Tensor]:
        """The loss of each microbatch on the last stage; an empty list elsewhere."""
        results = self._schedule(
            forward_step_func=self._forward,
            data_iterator=[iter(microbatches) for _ in self._chunks],
            model=self._chunks,
            num_microbatches=len(microbatches),
            seq_length=self._plan.shape.seq_length,
            micro_batch_size=self._plan.topology.mbs,
            forward_only=forward_only,
        )
        return [result["loss"] for result in results]

    def _forward(self, feed: Iterator[Microbatch], model: nn.Module) -> tuple[Tensor, LossOf]:
        batch = next(feed)
        tokens = context.own_part(batch.tokens, dim=1)  # (mbs, S / cp), and so the others
        positions = context.own_part(self._positions, dim=1)
        labels = context.own_part(batch.labels, dim=1)
        return model(tokens, positions, None, labels=labels), _mean_loss


build = Megatron


def _mean_loss(losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Losses (mbs, S / cp): every sample is full, so nothing is masked."""
    mean = losses.float().mean()
    # the schedule multiplies by cp, as if these were sums, and divides by the number of
    # microbatches in place
    return mean / context.ranks(), {"loss": mean.detach()}


def _distributed(
    chunk: nn.Module, settings: TransformerConfig, plan: Plan
) -> DistributedDataParallel:
    """The chunk in its precision, with gradients summed over replicas in fp32 for the last
    microbatch.
    """
    t = plan.topology
    is_half = t.precision != "fp32"
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=t.zero == 1,
        grad_reduce_in_fp32=is_half,
        overlap_grad_reduce=t.overlap_grad_reduce,
        overlap_param_gather=t.overlap_param_gather,
        bucket_size=max(40_000_000, 1_000_000 * t.dp),  # DDP's own
        num_distributed_optimizer_instances=t.instances,
    )
    if is_half:
        chunk = Float16Module(settings, chunk)
    wrapped = DistributedDataParallel(settings, ddp, chunk, **_layout(ddp, chunk))
    if not t.overlap_grad_reduce:
        patches.add_by_autograd(wrapped)
    return wrapped


def _layout(ddp: DistributedDataParallelConfig, chunk: nn.Module) -> dict[str, Any]:
    """Where parameters lie in DDP's buffers, which megatron-core's optimizer of 0.18 on
    computes.
    """
    compute = getattr(DistributedOptimizer, "compute_full_param_layout", None)
    if compute is None or not ddp.use_distributed_optimizer:
        return {}
    is_cut = ddp.overlap_grad_reduce and parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    replicas = parallel_state.get_data_parallel_world_size(
        with_context_parallel=True, partial_data_parallel=True
    )
    parameters = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
    bucket_size = ddp.bucket_size if is_cut else None
    of_experts = parallel_state.get_expert_data_parallel_world_size(
        partial_expert_data_parallel=True
    )
    return {"full_param_layout": compute(parameters, bucket_size, replicas, ddp, of_experts)}


def _optimizer_config(plan: Plan) -> OptimizerConfig:
    o = plan.optimizer
    t = plan.topology
    return OptimizerConfig(
        optimizer="adam",
        lr=o.lr,
        min_lr=o.min_lr,
        weight_decay=o.weight_decay,
        adam_beta1=o.adam_beta1,
        adam_beta2=o.adam_beta2,
        adam_eps=o.adam_eps,
        clip_grad=o.clip_grad,
        fp16=t.precision == "fp16",
        bf16=t.precision in ("bf16", "fp8"),
        params_dtype=DTYPES[t.precision],
        # DeepSpeed's default (initial_scale_power 16); megatron-core's own 2^32 skips 16 iterations
        # to get there.
        initial_loss_scale=2.0**16,
        use_distributed_optimizer=t.zero == 1,
        overlap_param_gather=t.overlap_param_gather,
    )


class Shard(NamedTuple):
    """The values `first` to `end` of a parameter, flattened, as `main` in a group of this rank's
    optimizer.
    """

    optimizer: torch.optim.Optimizer
    group: dict[str, Any]
    main: Tensor
    first: int
    end: int


class MegatronStates:
    """`named` parameters of DDP `chunks` in megatron-core's chained optimizers."""

    def __init__(self, named: Named, optimizers: Sequence[Any], chunks: Sequence[Any]) -> None:
        self.pieces = pieces(named)
        self.divided = any(map(_is_distributed, optimizers))
        self._parameters: list[Any] = [parameter for _, parameter in named]
        self._chunks = chunks
        self._inner = [chained.optimizer for chained in optimizers]
        self._scalers: list[Any] = []  # the dynamic loss scales of fp16
        for chained in optimizers:
            scaler = getattr(chained, "grad_scaler", None)
            if hasattr(scaler, "growth_interval"):
                self._scalers.append(scaler)
        self._shards = [_shard(parameter, optimizers) for parameter in self._parameters]

    def finish_step(self) -> None:
        """Gather the new weights now: with overlap_param_gather a replica gets the others' in its
        next forward pass.
        """
        for chunk in self._chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    def shard(self, number: int) -> tuple[int, int]:
        shard = self._shards[number]
        if shard:
            return (shard.first, shard.end)
        return (0, 0)

    def read(self, number: int, kind: str) -> Tensor:
        for inner in self._inner:  # fp16 may have skipped every step so far
            for group in inner.param_groups:
                init_moments(inner, group["params"])
        shard = self._shards[number]
        if shard is None:
            return torch.empty(0)
        if kind == "weight":
            held = shard.main
        else:
            held = shard.optimizer.state[shard.main][kind]
        return held.detach().view(-1)

    def write(self, number: int, weight: Tensor, moments: dict[str, Tensor]) -> None:
        first, end = self.shard(number)
        parameter = self._parameters[number]
        with torch.no_grad():
            parameter.copy_(weight.view_as(parameter))
            for kind, values in {"weight": weight.reshape(-1)[first:end], **moments}.items():
                self.read(number, kind).copy_(values)

    def copy(self, number: int) -> Tensor | None:
        parameter = self._parameters[number]
        shard = self._shards[number]
        if not self.divided and shard and shard.main is parameter:
            return None
        return parameter.detach().view(self.pieces[number].size)

    def decays(self) -> list[float | None]:
        return [shard.group["weight_decay"] if shard else None for shard in self._shards]

    def scalars(self) -> dict[str, float]:
        values = {"step": step_of(self._inner)}
        if self._scalers:
            state = self._scalers[0].state_dict()
            values["loss_scale"] = state["scale"].item()
            values["good_steps"] = state["growth_tracker"]
            values["hysteresis"] = state["hysteresis_tracker"]
        return values

    def set_scalars(self, values: dict[str, float]) -> None:
        set_step(self._inner, values["step"])
        if "loss_scale" not in values:
            return
        for scaler in self._scalers:
            state: Any = {"scale": torch.full_like(scaler.scale, values["loss_scale"])}
            state["growth_tracker"] = int(values["good_steps"]) % scaler.growth_interval
            state["hysteresis_tracker"] = int(values["hysteresis"])
            scaler.load_state_dict(state)


def _is_distributed(chained: Any) -> bool:
    """Whether it is megatron-core's distributed optimizer."""
    return hasattr(chained, "model_param_group_index_map")


def _shard(parameter: nn.Parameter, optimizers: Sequence[Any]) -> Shard | None:
    """The parameter's shard on this rank; None where other replicas update all of it."""
    for chained in optimizers:
        inner = chained.optimizer
        if _is_distributed(chained):
            if parameter in chained.model_param_group_index_map:
                number, place = chained.model_param_group_index_map[parameter]
                group = inner.param_groups[number]
                buffer, dtype, bucket = chained.model_param_gbuf_map[parameter]
                part = chained.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
                return Shard(inner, group, group["params"][place], part.start, part.end)
            continue
        main = getattr(parameter, "main_param", parameter)
        for group in inner.param_groups:
            if any(main is other for other in group["params"]):
                return Shard(inner, group, main, 0, parameter.numel())
    return None
