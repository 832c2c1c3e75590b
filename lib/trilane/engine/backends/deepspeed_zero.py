"""The `deepspeed-zero` engine: DeepSpeed's ZeRO 0 to 3 and offload around megatron-core's tensor-parallel GPT."""

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig

from trilane.config.plan import Plan
from trilane.engine.backends.deepspeed_common import (
    CONFIG,
    WholeClipping,
    begin_step,
    groups,
    loss_scale,
    mark_phases,
    quiet,
    settings,
    start,
    step_of,
    sum_shared_gradients,
)
from trilane.engine.backends.deepspeed_states import DeepSpeedStates
from trilane.engine.backends.optimizers import deepspeed_audit
from trilane.engine.distributed.world import World
from trilane.engine.interface import Microbatch, Step
from trilane.engine.model import fused_path
from trilane.engine.model.gpt import canonical_parameters, empty_chunk, fill, transformer_config
from trilane.engine.model.rng import seed_streams


class Mpu:
    """DeepSpeed's interface to tensor parallelism, implemented by megatron-core."""

    get_model_parallel_world_size = staticmethod(parallel_state.get_tensor_model_parallel_world_size)
    get_model_parallel_rank = staticmethod(parallel_state.get_tensor_model_parallel_rank)
    get_model_parallel_group = staticmethod(parallel_state.get_tensor_model_parallel_group)
    get_data_parallel_world_size = staticmethod(parallel_state.get_data_parallel_world_size)
    get_data_parallel_rank = staticmethod(parallel_state.get_data_parallel_rank)
    get_data_parallel_group = staticmethod(parallel_state.get_data_parallel_group)


def build(plan: Plan, world: World) -> "DeepSpeedZero":
    """The engine; collective over all ranks."""
    parallel_state.initialize_model_parallel(plan.topology.tp, create_gloo_process_groups=False)
    seed_streams(plan.run.seed)
    start()
    return DeepSpeedZero(plan, world)


class DeepSpeedZero:
    """TP and ZeRO of one plan; `step` runs one iteration, collectively."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan = plan
        ds_config = settings(plan)
        self.settings: dict[str, Any] = {CONFIG: ds_config}
        path = fused_path.choose(plan, world)
        self.path = str(path)
        model = _model(plan, ds_config, fused_path.apply(path, transformer_config(plan)))
        named = list(canonical_parameters(model, plan.shape.tied_embeddings))
        sum_shared_gradients(parameter for _, parameter in named)
        decay = plan.optimizer.weight_decay
        with quiet():
            self._engine, optimizer, *_ = deepspeed.initialize(
                model=model, config=ds_config, model_parameters=groups(named, decay), mpu=Mpu()
            )
        self.modules = [model]
        mark_phases(self._engine)
        self.audit = deepspeed_audit(named, optimizer, decay)
        self.states = DeepSpeedStates(named, optimizer, plan.topology.zero)
        self._clipping = WholeClipping(self._engine, plan) if plan.topology.zero == 0 else None
        shape = (plan.topology.mbs, plan.shape.seq_length)
        self._positions = torch.arange(shape[1], device=world.device).expand(shape)  # (mbs, seq_length)

    @property
    def replica(self) -> tuple[int, int]:
        """Data-parallel rank and size."""
        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    def step(self, microbatches: Sequence[Microbatch], lr: float) -> Step:
        """One iteration: DeepSpeed sums the gradients of the microbatches and updates after the last of them."""
        begin_step(self._engine, lr, len(microbatches))
        scale, losses = loss_scale(self._engine, self._plan), []
        for number, batch in enumerate(microbatches, 1):
            # DeepSpeed counts microbatches since the start of the run, which is wrong once the batch has grown.
            self._engine.set_gradient_accumulation_boundary(number == len(microbatches))
            loss = self._loss(batch)
            self._engine.backward(loss)
            losses.append(loss.detach())
            self._engine.step()
        norm = self._clipping.norm if self._clipping else None
        return step_of(self._engine, self._mean(losses), scale, norm)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        """Mean loss of one batch, forward alone."""
        self._engine.eval()
        with torch.no_grad():
            losses = [self._loss(batch) for batch in microbatches]
        self._engine.train()
        return self._mean(losses)

    def _loss(self, batch: Microbatch) -> torch.Tensor:
        return self._engine(batch.tokens, self._positions, None, labels=batch.labels).float().mean()

    def _mean(self, losses: list[torch.Tensor]) -> float:
        """Mean over microbatches and replicas."""
        mean = torch.stack(losses).mean()
        group = parallel_state.get_data_parallel_group()
        dist.all_reduce(mean, group=group)
        return mean.item() / group.size()


def _model(plan: Plan, ds_config: dict[str, Any], megatron: TransformerConfig) -> torch.nn.Module:
    """The GPT in its initial state. Under stage 3 no rank ever holds more than its share."""
    if plan.topology.zero < 3:
        model = empty_chunk(plan, megatron, None)
        fill(model, plan)
        return model
    import torch._dynamo  # noqa: F401 - its first import fails inside zero.Init, which replaces Tensor.__new__

    replicas = parallel_state.get_data_parallel_group()
    with deepspeed.zero.Init(config_dict_or_path=ds_config, data_parallel_group=replicas, mpu=Mpu()):
        model = empty_chunk(plan, megatron, None)
    fill(model, plan)
    return model
