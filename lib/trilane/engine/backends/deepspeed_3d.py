"""The `deepspeed-3d` engine: DeepSpeed's pipeline (1F1B) and ZeRO-1 over megatron-core's tensor-parallel layers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from megatron.core import parallel_state, tensor_parallel

from trilane.config.plan import Plan
from trilane.costmodel.memory import stage_layers
from trilane.engine.backends.deepspeed_common import (
    CONFIG,
    WholeClipping,
    begin_step,
    groups,
    loss_scale,
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
from trilane.engine.model import fused_path, pipeline_layers
from trilane.engine.model.gpt import fill_parameters, transformer_config
from trilane.engine.model.rng import seed_streams
from trilane.engine.monitor.phases import BACKWARD, DATA, FORWARD, OPTIMIZER, P2P, REDUCE, during

# Our name of the partition -> DeepSpeed's, whose own "uniform" would count embedding, positions and norm as layers.
METHODS = {"uniform": "type:transformer", "type:transformer|embedding": "type:transformer|embedding"}
# Phases of DeepSpeed's instructions; all others send and receive.
PHASES = {"LoadMicroBatch": DATA, "ForwardPass": FORWARD, "BackwardPass": BACKWARD, "OptimizerStep": OPTIMIZER}
PHASES |= {"ReduceGrads": REDUCE, "ReduceTiedGrads": REDUCE}


def build(plan: Plan, world: World) -> "DeepSpeed3D":
    """The engine; collective over all ranks."""
    parallel_state.initialize_model_parallel(plan.topology.tp, plan.topology.pp, create_gloo_process_groups=False)
    seed_streams(plan.run.seed)
    start()
    return DeepSpeed3D(plan, world)


class DeepSpeed3D:
    """TP, PP and DP of one plan; `step` runs one iteration, collectively."""

    def __init__(self, plan: Plan, world: World) -> None:
        self._plan = plan
        path = fused_path.choose(plan, world)
        self.path = str(path)
        ds_config = settings(plan)
        self.settings: dict[str, Any] = {CONFIG: ds_config}
        decay = plan.optimizer.weight_decay
        with quiet():
            stage = _stage(plan, path)
            named = list(pipeline_layers.canonical_parameters(stage))
            fill_parameters(named, plan)
            sum_shared_gradients(parameter for _, parameter in named)
            self._engine, optimizer, *_ = deepspeed.initialize(
                model=stage, config=ds_config, model_parameters=groups(named, decay)
            )
        self._engine._INSTRUCTION_MAP = {
            kind: during(PHASES.get(kind.__name__, P2P), function)
            for kind, function in self._engine._INSTRUCTION_MAP.items()
        }
        self.modules = [stage]
        _check_grid(self._engine, plan)
        self._clipping = WholeClipping(self._engine, plan) if plan.topology.zero == 0 else None
        self.audit = deepspeed_audit(named, optimizer, decay)
        self.states = DeepSpeedStates(named, optimizer, plan.topology.zero)

    @property
    def replica(self) -> tuple[int, int]:
        """Data-parallel rank and size."""
        return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()

    def step(self, microbatches: Sequence[Microbatch], lr: float) -> Step:
        """One iteration: the pipeline over the microbatches, clipping and update; every rank gets the loss."""
        begin_step(self._engine, lr, len(microbatches))
        scale = loss_scale(self._engine, self._plan)
        loss = self._engine.train_batch(iter([(batch.tokens, batch.labels) for batch in microbatches]))
        return step_of(self._engine, loss.item(), scale, self._clipping.norm if self._clipping else None)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> float:
        """Mean loss of one batch by DeepSpeed's inference schedule; every rank gets it."""
        feed = iter([(batch.tokens, batch.labels) for batch in microbatches])
        loss = self._engine.eval_batch(feed, num_micro_batches=len(microbatches))
        return loss.item()


def _stage(plan: Plan, path: fused_path.KernelPath) -> PipelineModule:
    """This rank's layers, not yet initialized."""
    t = plan.topology
    # Layers inside DeepSpeed's pipeline must see pp 1: megatron-core would shift their numbers otherwise.
    one_stage = replace(plan, topology=replace(t, pp=1, recompute="none", partition="uniform"))
    return PipelineModule(
        pipeline_layers.layers(plan, fused_path.apply(path, transformer_config(one_stage))),
        topology=PipeModelDataParallelTopology(num_pp=t.pp, num_mp=t.tp, num_dp=t.dp),
        loss_fn=partial(pipeline_layers.mean_loss, fused=path.fused, z_loss=plan.optimizer.z_loss),
        partition_method=METHODS[t.partition],
        activation_checkpoint_interval=1 if t.recompute == "full" else 0,
        activation_checkpoint_func=_recomputed,
        checkpointable_layers=[pipeline_layers.TransformerLayer.__name__],
    )


def _recomputed(function: Callable[..., Any], *inputs: torch.Tensor) -> Any:
    """megatron-core's activation checkpoint: DeepSpeed's does not rewind the generators of megatron-core's dropout."""
    return tensor_parallel.checkpoint(function, False, *inputs)


def _check_grid(engine: Any, plan: Plan) -> None:
    """Assert that both libraries give this rank the same coordinates, and the stage the planned layers."""
    grid, module = engine.grid, engine.module
    assert grid.get_data_parallel_rank() == parallel_state.get_data_parallel_rank()
    assert grid.get_slice_parallel_rank() == parallel_state.get_tensor_model_parallel_rank()
    assert grid.get_stage_id() == parallel_state.get_pipeline_model_parallel_rank()
    held = sum(isinstance(layer, pipeline_layers.TransformerLayer) for layer in module.forward_funcs)
    assert held == stage_layers(plan.shape, plan.topology)[grid.get_stage_id()], module.parts
