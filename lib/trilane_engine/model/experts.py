"""Mixtures of experts: megatron-core's layer of them around our matrices, and how ranks share
experts.

Expert parallelism is a second division of the ranks that tp, cp and dp number: those of a group
share the experts of a layer, `etp` of them each one. An expert's replicas are the ranks that hold
the same part of it.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from trilane.config.parallelism import SINGLE
from trilane.config.plan import Plan
from trilane.workspace.fingerprints import is_expert
from trilane_engine import patches
from trilane_engine.model.layer import ColumnLinear, RowLinear


def settings(plan: Plan) -> dict[str, Any]:
    """What megatron-core's TransformerConfig has of experts."""
    shape = plan.shape
    t = plan.topology
    if not shape.experts:
        return {}
    dispatcher = {"moe_token_dispatcher_type": t.dispatcher}
    if t.dispatcher in SINGLE:
        dispatcher = {"moe_token_dispatcher_type": "flex"}
        dispatcher["moe_flex_dispatcher_backend"] = t.dispatcher
    return dispatcher | {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.top_k,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_shared_expert_intermediate_size": shape.shared_channels or None,
        "moe_shared_expert_gate": shape.shared_gate,
        "moe_router_pre_softmax": shape.router_pre_softmax,
        "moe_router_topk_scaling_factor": shape.router_scaling,
        "moe_aux_loss_coeff": shape.aux_loss,
        "moe_router_dtype": "fp32",
        "expert_model_parallel_size": t.ep,
        "expert_tensor_parallel_size": t.etp,
    }


def experts_spec() -> ModuleSpec:
    """A layer's experts in place of its MLP: a token's router, experts one after another, shared
    ones.
    """
    patches.use_experts()
    linears = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    parts = MoESubmodules(
        experts=ModuleSpec(SequentialMLP, submodules=linears),
        shared_experts=ModuleSpec(SharedExpertMLP, submodules=linears),
    )
    return ModuleSpec(MoELayer, submodules=parts)


class Loads:
    """Tokens that the routers of this rank's models sent to each expert in this iteration."""

    def __init__(self, models: Iterable[torch.nn.Module]) -> None:
        self._sent: dict[torch.nn.Module, Any] = {}
        for model in models:
            for module in model.modules():
                if isinstance(module, TopKRouter):
                    module.register_forward_hook(self._count)

    def _count(self, router: torch.nn.Module, _: Any, result: tuple[Tensor, Tensor]) -> None:
        if torch.is_grad_enabled():  # once where a layer is recomputed, not in evaluations
            self._sent[router] = self._sent.get(router, 0) + result[1].sum(0)

    def imbalance(self) -> float:
        """Tokens of the busiest expert over the mean, in the worst layer of all; collective."""
        worst = torch.ones((), device=torch.cuda.current_device())
        group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
        for counts in self._sent.values():
            dist.all_reduce(counts, group=group)
            worst = torch.maximum(worst, counts.max() / counts.float().mean())
        self._sent.clear()
        dist.all_reduce(
            worst, dist.ReduceOp.MAX, parallel_state.get_pipeline_model_parallel_group()
        )
        return worst.item()


def tensor_parallel(name: str) -> tuple[int, int]:
    """This rank's place among those that divide parameter `name`, and their number."""
    if is_expert(name):
        return (
            parallel_state.get_expert_tensor_parallel_rank(),
            parallel_state.get_expert_tensor_parallel_world_size(),
        )
    return (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )


def replica(name: str, divided: bool) -> tuple[int, int]:
    """This rank's place among those that hold the same part of parameter `name`, or of its
    `divided` states, and their number.
    """
    if divided:
        group = parallel_state.get_inter_distributed_optimizer_instance_group(False)
    elif is_expert(name):
        group = parallel_state.get_expert_data_parallel_group()
    else:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return (group.rank(), group.size()) if group else (0, 1)
