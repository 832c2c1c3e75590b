"""Mixtures of experts: megatron-core's layer of them around our matrices, and how ranks share
experts.

Expert parallelism is a second division of the ranks that tp, cp and dp number: those of a group
share the experts of a layer, `etp` of them each one. An expert's replicas are the ranks that hold
the same part of it.
"""

from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.spec_utils import ModuleSpec

from trilane.config.plan import Plan
from trilane.workspace.fingerprints import is_expert
from trilane_engine.model.layer import ColumnLinear, RowLinear


def settings(plan: Plan) -> dict[str, Any]:
    """What megatron-core's TransformerConfig has of experts."""
    shape = plan.shape
    t = plan.topology
    if not shape.experts:
        return {}
    return {
        "num_moe_experts": shape.experts,
        "moe_router_topk": shape.top_k,
        "moe_ffn_hidden_size": shape.expert_ffn,
        "moe_shared_expert_intermediate_size": shape.shared_channels or None,
        "moe_shared_expert_gate": shape.shared_gate,
        "moe_router_pre_softmax": shape.router_pre_softmax,
        "moe_router_topk_scaling_factor": shape.router_scaling,
        "moe_aux_loss_coeff": shape.aux_loss,
        "moe_router_dtype": "fp32",
        "moe_token_dispatcher_type": t.dispatcher,
        "expert_model_parallel_size": t.ep,
        "expert_tensor_parallel_size": t.etp,
    }


def experts_spec() -> ModuleSpec:
    """A layer's experts in place of its MLP: a token's router, experts one after another, shared
    ones.
    """
    linears = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
    parts = MoESubmodules(
        experts=ModuleSpec(SequentialMLP, submodules=linears),
        shared_experts=ModuleSpec(SharedExpertMLP, submodules=linears),
    )
    return ModuleSpec(MoELayer, submodules=parts)


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


def replicas(name: str) -> dist.ProcessGroup:
    """The ranks that hold the same part of parameter `name`."""
    if is_expert(name):
        return parallel_state.get_expert_data_parallel_group()
    return parallel_state.get_data_parallel_group(with_context_parallel=True)
