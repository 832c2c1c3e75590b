"""The `megatron` engine: megatron-core's schedules, DDP and optimizer, as Megatron-LM's own
training loop uses them.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
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
from trilane_engine.model import context, rng, te
from trilane_engine.model.fused import DTYPES, apply, compiled
from trilane_engine.model.gpt import (
    build_chunks,
    canonical_parameters,
    layer_spec,
    transformer_config,
)
from trilane_engine.model.own_layer import own_spec, try_out
from trilane_engine.nonfinite import first_of
from trilane_engine.phases import OPTIMIZER, megatron_timers, phase

LossOf = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]


class Megatron(Engine):
    """TP, PP (1F1B, interleaved) and DP of one plan."""

    def _build(self) -> None:
        plan, t = self._plan, self._plan.topology
        te.start(plan, self._positions.device)
        settings = apply(self._kernels, transformer_config(plan))
        self.path += "; Transformer Engine's layers" * te.is_chosen(settings)
        self.path += f"; layer {plan.layer}, of which no prediction knows" * bool(plan.layer)
        own = own_spec(plan, layer_spec(plan.shape, settings)) if plan.layer else None
        models = build_chunks(plan, settings, own)
        for made in (made for model in models for made in model.decoder.layers if plan.layer):
            try_out(plan, made.to(settings.params_dtype))
        for layer in (
            made for model in models for made in model.decoder.layers if plan.run.fused == "layer"
        ):
            layer.forward = compiled(layer.forward)
        named = [
            pair
            for model in models
            for pair in canonical_parameters(model, plan.shape.tied_embeddings)
        ]
        self._parameters: list[Any] = [parameter for _, parameter in named]
        self.modules = self._chunks = [_distributed(model, settings, plan) for model in models]
        patches.use_torch_optimizer()
        self._optimizer = get_megatron_optimizer(
            _optimizer_config(plan), self._chunks, use_gloo_process_groups=False
        )
        for group in self._optimizer.param_groups:
            # As Megatron-LM's scheduler does; megatron-core only sets `wd_mult`: norms and biases
            # would decay.
            group["weight_decay"] = plan.optimizer.weight_decay * group["wd_mult"]
            if t.adam == "fused":  # reads and writes each state once
                group["fused"], group["foreach"] = True, False
        optimizers = self._optimizer.chained_optimizers
        self.states = MegatronStates(named, optimizers, self._chunks)
        patches.send_aliases()
        settings.timers = megatron_timers(pipeline=t.pp > 1)
        settings.finalize_model_grads_func = finalize_model_grads
        settings.grad_scale_func = self._optimizer.scale_loss
        if t.overlap_grad_reduce:
            # Gradients are reduced as they arrive, in the last microbatch only.
            no_sync = [chunk.no_sync for chunk in self._chunks]
            settings.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self._schedule = get_forward_backward_func()
        self._found = ""
        self._draws = plan.layer is not None or max(plan.dropout.attention, plan.dropout.hidden) > 0
        norm = self._optimizer.get_grad_norm
        # the only place between the gradients and the update, which makes all weights NaN
        self._optimizer.get_grad_norm = lambda: self._examined(norm())

    def _step(self, microbatches: Sequence[Microbatch]) -> Step:
        self._batch, self._random = microbatches, rng.states() if self._draws else None
        self._zero_grad()
        scale = self._optimizer.get_loss_scale().item()
        losses = self._forward_backward(microbatches)
        with phase(OPTIMIZER):
            updated, grad_norm, _ = self._optimizer.step()
        loss = self._mean(losses)
        if not updated:
            self._examined_skip(math.isfinite(loss), scale)
        step = Step(
            loss=loss, grad_norm=float(grad_norm or 0.0), loss_scale=scale, skipped=not updated
        )
        return replace(step, not_finite=self._found)

    def _examined(self, norm: float) -> float:
        """The gradient norm; where it is not finite, the same on all ranks, the first such value is
        searched once.

        The gradients are those of the repetition then.
        """
        if not math.isfinite(norm) and not self._found:
            if self._random:
                rng.restore(self._random)
            self._zero_grad()
            with self._gathered():
                self._found = first_of(self._chunks, lambda: self._forward_backward(self._batch))
        return norm

    def _examined_skip(self, is_finite: bool, scale: float) -> None:
        """Search also where fp16 skips an iteration, unless a smaller loss scale may mend it."""
        lost = torch.tensor(int(not is_finite or scale <= self._optimizer.config.min_loss_scale))
        dist.all_reduce(
            lost := lost.to(self._positions.device), op=dist.ReduceOp.MAX
        )  # stages have no loss
        self._examined(math.nan if lost.item() else 0.0)

    def _zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()
        for parameter in () if self._plan.topology.overlap_grad_reduce else self._parameters:
            parameter.grad = parameter.main_grad

    def _evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        with self._gathered():
            return self._mean(self._forward_backward(microbatches, forward_only=True))

    @contextlib.contextmanager
    def _gathered(self) -> Iterator[None]:
        """Parameters are gathered, which overlap_param_gather left to the next forward pass."""
        gathering = self._chunks if self._plan.topology.overlap_param_gather else []
        for chunk in gathering:
            chunk.disable_forward_pre_hook()
        yield
        for chunk in gathering:
            chunk.enable_forward_pre_hook()

    def _forward_backward(
        self, microbatches: Sequence[Microbatch], forward_only: bool = False
    ) -> list[torch.Tensor]:
        """The loss of each microbatch on the last stage; an empty list elsewhere."""
        interleaved = len(self._chunks) > 1
        feeds = [iter(microbatches) for _ in self._chunks]
        results = self._schedule(
            forward_step_func=self._forward,
            data_iterator=feeds if interleaved else feeds[0],
            model=self._chunks if interleaved else self._chunks[0],
            num_microbatches=len(microbatches),
            seq_length=self._plan.shape.seq_length,
            micro_batch_size=self._plan.topology.mbs,
            forward_only=forward_only,
        )
        return [result["loss"] for result in results]

    def _forward(
        self, feed: Iterator[Microbatch], model: torch.nn.Module
    ) -> tuple[torch.Tensor, LossOf]:
        batch = next(feed)
        whole = batch.tokens, self._positions, batch.labels  # (mbs, S) each
        tokens, positions, labels = (context.own_part(x, dim=1) for x in whole)
        return model(tokens, positions, None, labels=labels), _mean_loss


build = Megatron


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = (
        losses.float().mean()
    )  # losses (mbs, seq_length / cp): every sample is full, so nothing is masked
    # the schedule multiplies by cp, as if these were sums, and divides by the number of
    # microbatches in place
    return mean / context.ranks(), {"loss": mean.detach()}


def _distributed(
    chunk: torch.nn.Module, settings: TransformerConfig, plan: Plan
) -> DistributedDataParallel:
    """The chunk in its precision, with gradients summed over replicas in fp32 for the last
    microbatch.
    """
    t, half = plan.topology, plan.topology.precision != "fp32"
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=t.zero == 1,
        grad_reduce_in_fp32=half,
        overlap_grad_reduce=t.overlap_grad_reduce,
        overlap_param_gather=t.overlap_param_gather,
        bucket_size=max(40_000_000, 1_000_000 * t.dp),  # DDP's own
    )
    chunk = Float16Module(settings, chunk) if half else chunk
    made = DistributedDataParallel(settings, ddp, chunk, **_layout(ddp, chunk))
    if not t.overlap_grad_reduce:
        patches.add_by_autograd(made)
    return made


def _layout(ddp: DistributedDataParallelConfig, chunk: torch.nn.Module) -> dict[str, Any]:
    """Where parameters lie in DDP's buffers, which megatron-core's optimizer of 0.18 on computes."""
    compute = getattr(DistributedOptimizer, "compute_full_param_layout", None)
    if compute is None or not ddp.use_distributed_optimizer:
        return {}
    is_cut = ddp.overlap_grad_reduce and parallel_state.is_pipeline_first_stage(ignore_virtual=True)
    replicas = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    parameters = [parameter for parameter in chunk.parameters() if parameter.requires_grad]
    bucket_size = ddp.bucket_size if is_cut else None
    return {"full_param_layout": compute(parameters, bucket_size, replicas, ddp)}


def _optimizer_config(plan: Plan) -> OptimizerConfig:
    o, t = plan.optimizer, plan.topology
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
    main: torch.Tensor
    first: int
    end: int


class MegatronStates:
    """`named` parameters of DDP `chunks` in megatron-core's chained optimizers."""

    def __init__(self, named: Named, optimizers: Sequence[Any], chunks: Sequence[Any]) -> None:
        self.pieces = pieces(named)
        self.divided = any(
            hasattr(optimizer, "model_param_group_index_map") for optimizer in optimizers
        )
        self._parameters: list[Any] = [parameter for _, parameter in named]
        self._chunks, self._inner = chunks, [chained.optimizer for chained in optimizers]
        scalers = (getattr(chained, "grad_scaler", None) for chained in optimizers)
        # the dynamic loss scales of fp16
        self._scalers: list[Any] = [
            scaler for scaler in scalers if hasattr(scaler, "growth_interval")
        ]
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
        return (shard.first, shard.end) if shard else (0, 0)

    def read(self, number: int, kind: str) -> torch.Tensor:
        for inner in self._inner:  # fp16 may have skipped every step so far
            init_moments(
                inner, (parameter for group in inner.param_groups for parameter in group["params"])
            )
        shard = self._shards[number]
        if shard is None:
            return torch.empty(0)
        held = shard.main if kind == "weight" else shard.optimizer.state[shard.main][kind]
        return held.detach().view(-1)

    def write(self, number: int, weight: torch.Tensor, moments: dict[str, torch.Tensor]) -> None:
        first, end = self.shard(number)
        with torch.no_grad():
            self._parameters[number].copy_(weight.view_as(self._parameters[number]))
            for kind, values in {"weight": weight.reshape(-1)[first:end], **moments}.items():
                self.read(number, kind).copy_(values)

    def copy(self, number: int) -> torch.Tensor | None:
        parameter, shard = self._parameters[number], self._shards[number]
        if not self.divided and shard and shard.main is parameter:
            return None
        return parameter.detach().view(self.pieces[number].size)

    def decays(self) -> list[float | None]:
        return [shard.group["weight_decay"] if shard else None for shard in self._shards]

    def scalars(self) -> dict[str, float]:
        found = {"step": step_of(self._inner)}
        for scaler in self._scalers[:1]:
            held = scaler.state_dict()
            found["loss_scale"] = held["scale"].item()
            found["good_steps"] = held["growth_tracker"]
            found["hysteresis"] = held["hysteresis_tracker"]
        return found

    def set_scalars(self, values: dict[str, float]) -> None:
        set_step(self._inner, values["step"])
        for scaler in self._scalers if "loss_scale" in values else ():
            held: Any = {"scale": torch.full_like(scaler.scale, values["loss_scale"])}
            held["growth_tracker"] = int(values["good_steps"]) % scaler.growth_interval
            held["hysteresis_tracker"] = int(values["hysteresis"])
            scaler.load_state_dict(held)


def _shard(parameter: torch.nn.Parameter, optimizers: Sequence[Any]) -> Shard | None:
    """The parameter's shard on this rank; None where other replicas update all of it."""
    for chained in optimizers:
        if hasattr(chained, "model_param_group_index_map"):  # the distributed optimizer
            place = chained.model_param_group_index_map.get(parameter)
            if place is not None:
                group = chained.optimizer.param_groups[place[0]]
                buffer, dtype, bucket = chained.model_param_gbuf_map[parameter]
                part = chained.gbuf_ranges[buffer][dtype][bucket]["param_map"][parameter]["param"]
                return Shard(
                    chained.optimizer, group, group["params"][place[1]], part.start, part.end
                )
            continue
        main = getattr(parameter, "main_param", parameter)
        for group in chained.optimizer.param_groups:
            if any(main is other for other in group["params"]):
                return Shard(chained.optimizer, group, main, 0, parameter.numel())
    return None
