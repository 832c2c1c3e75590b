"""The `megatron` engine: megatron-core's schedules, DDP and optimizer, as Megatron-LM's own training loop uses them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig

from trilane.config.plan import Plan
from trilane.engine.backends.megatron_states import MegatronStates
from trilane.engine.backends.optimizers import decay_audit, fuse_adam, use_foreach
from trilane.engine.distributed.world import World
from trilane.engine.interface import Microbatch, Step
from trilane.engine.model import fused_path
from trilane.engine.model.gpt import DTYPES, build_chunks, canonical_parameters, transformer_config
from trilane.engine.model.rng import seed_streams
from trilane.engine.monitor.phases import OPTIMIZER, MegatronTimers, phase

LossOf = Callable[[torch.Tensor], tuple[torch.Tensor, dict[str, torch.Tensor]]]
# DeepSpeed's default (initial_scale_power 16); megatron-core's own 2**32 skips the first 16 iterations to get there.
INITIAL_LOSS_SCALE = 2.0**16


def build(plan: Plan, world: World) -> "Megatron":
    """The engine; collective over all ranks."""
    t = plan.topology
    # The additional gloo groups serve megatron-core's own checkpoints, which we do not write.
    parallel_state.initialize_model_parallel(
        t.tp,
        t.pp,
        virtual_pipeline_model_parallel_size=t.interleaving if t.interleaving > 1 else None,
        create_gloo_process_groups=False,
    )
    seed_streams(plan.run.seed)
    return Megatron(plan, world)


class Megatron:
    """TP, PP (1F1B, interleaved) and DP of one plan; `step` runs one iteration, collectively."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan, self._world = plan, world
        self.settings: dict[str, Any] = {}
        path = fused_path.choose(plan, world)
        self.path = str(path)
        settings = fused_path.apply(path, transformer_config(plan))
        use_foreach()
        models = build_chunks(plan, settings)
        named = [pair for model in models for pair in canonical_parameters(model, plan.shape.tied_embeddings)]
        self._chunks = [_distributed(model, settings, plan) for model in models]
        self.modules = self._chunks
        self._optimizer = get_megatron_optimizer(_optimizer_config(plan), self._chunks, use_gloo_process_groups=False)
        _set_weight_decay(self._optimizer, plan.optimizer.weight_decay)
        if path.fused:
            fuse_adam(chained.optimizer for chained in self._optimizer.chained_optimizers)
        self.audit = decay_audit(self._chunks, self._optimizer.chained_optimizers, plan.optimizer.weight_decay)
        settings.timers = MegatronTimers(pipeline=plan.topology.pp > 1)
        self.states = MegatronStates(named, self._optimizer.chained_optimizers, self._chunks)
        settings.finalize_model_grads_func = finalize_model_grads
        settings.grad_scale_func = self._optimizer.scale_loss
        if plan.topology.overlap_grad_reduce:
            # Gradients are reduced as they arrive, in the last microbatch only.
            no_sync = [chunk.no_sync for chunk in self._chunks]
            settings.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self._schedule = get_forward_backward_func()
        shape = (plan.topology.mbs, plan.shape.seq_length)
        self._positions = torch.arange(shape[1], device=world.device).expand(shape)  # (mbs, seq_length)

    @property
    def replica(self) -> tuple[int, int]:
        """Data-parallel rank and size."""
        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    def step(self, microbatches: Sequence[Microbatch], lr: float) -> Step:
        """One iteration: zero the gradients, run the pipeline over the microbatches, clip, update."""
        self._zero_grad()
        _set_lr(self._optimizer, lr)
        scale = self._optimizer.get_loss_scale().item()
        losses = self._forward_backward(microbatches)
        with phase(OPTIMIZER):
            updated, grad_norm, _ = self._optimizer.step()
        return Step(loss=self._mean(losses), grad_norm=float(grad_norm or 0.0), loss_scale=scale, skipped=not updated)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        """Mean loss of one batch: the same schedule, forward alone."""
        gathers = self._plan.topology.overlap_param_gather
        for chunk in self._chunks:
            chunk.eval()
            if gathers:  # the gathering of parameters, which the last step left to the next forward pass
                chunk.disable_forward_pre_hook()
        with torch.no_grad():
            losses = self._forward_backward(microbatches, forward_only=True)
        for chunk in self._chunks:
            chunk.train()
            if gathers:
                chunk.enable_forward_pre_hook()
        return self._mean(losses)

    def _zero_grad(self) -> None:
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        self._optimizer.zero_grad()

    def _forward_backward(self, microbatches: Sequence[Microbatch], forward_only: bool = False) -> list[torch.Tensor]:
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

    def _forward(self, feed: Iterator[Microbatch], model: torch.nn.Module) -> tuple[torch.Tensor, LossOf]:
        batch = next(feed)
        return model(batch.tokens, self._positions, None, labels=batch.labels), _mean_loss

    def _mean(self, losses: list[torch.Tensor]) -> float:
        """Mean over microbatches and replicas on the last stage; 0 on the other stages, which have no loss."""
        if not losses:
            return 0.0
        mean = torch.stack(losses).mean()
        group = parallel_state.get_data_parallel_group()
        dist.all_reduce(mean, group=group)
        return mean.item() / group.size()


def _mean_loss(losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mean = losses.float().mean()  # losses (mbs, seq_length): every sample is full, so nothing is masked
    # A copy: the schedule divides `mean` by the number of microbatches in place.
    return mean, {"loss": mean.detach().clone()}


def _distributed(chunk: torch.nn.Module, settings: TransformerConfig, plan: Plan) -> DistributedDataParallel:
    """The chunk in its precision, with gradients summed over replicas in fp32 for the last microbatch."""
    t = plan.topology
    half = t.precision != "fp32"
    ddp = DistributedDataParallelConfig(
        use_distributed_optimizer=t.zero == 1,
        grad_reduce_in_fp32=half,
        overlap_grad_reduce=t.overlap_grad_reduce,
        overlap_param_gather=t.overlap_param_gather,
    )
    return DistributedDataParallel(settings, ddp, Float16Module(settings, chunk) if half else chunk)


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
        bf16=t.precision == "bf16",
        params_dtype=DTYPES[t.precision],
        initial_loss_scale=INITIAL_LOSS_SCALE,
        use_distributed_optimizer=t.zero == 1,
        overlap_param_gather=t.overlap_param_gather,
    )


def _set_weight_decay(optimizer: MegatronOptimizer, decay: float) -> None:
    """Apply `wd_mult`, as Megatron-LM's scheduler does; megatron-core only sets it: norms and biases would decay."""
    for group in optimizer.param_groups:
        group["weight_decay"] = decay * group["wd_mult"]


def _set_lr(optimizer: MegatronOptimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
