"""Transformer Engine's norms, matrices and attention: the same parameters by the same names as
without it.

A plan asks for them by precision=fp8, overlap_tp or run.fused=te. Norm and matrix stay apart, since
its fused ones have other names: initial values and checkpoints are those of the other path. Written
after megatron-core 0.16.1 (extensions/transformer_engine.py) and Megatron-LM
(training/initialize.py); not tried, as all of it needs CUDA.
"""

from typing import Any

import torch
from megatron.core.extensions import transformer_engine as layers
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from trilane.config.plan import Plan
from trilane.utils.validation import HostError

Norm = layers.TENorm
ColumnLinear = layers.TEColumnParallelLinear
RowLinear = layers.TERowParallelLinear


def settings(plan: Plan) -> dict[str, Any]:
    """What megatron-core's TransformerConfig has of it.

    E4M3 in the forward pass, E5M2 for gradients (Micikevicius et al. 2022, arXiv:2209.05433,
    section 3); each matrix is scaled by its own largest value (`tensorwise`): scales by those of
    earlier iterations would be state to save.
    """
    t = plan.topology
    fp8: dict[str, str] = {}
    if t.precision == "fp8":
        fp8 = {"fp8": "hybrid", "fp8_recipe": "tensorwise"}
    if fp8 or t.overlap_tp or plan.run.fused == "te":
        kind = "transformer_engine"
    else:
        kind = "local"
    return {"transformer_impl": kind, "tp_comm_overlap": t.overlap_tp, **fp8}


def is_chosen(config: TransformerConfig) -> bool:
    """Whether the layers of this model are Transformer Engine's."""
    return config.transformer_impl == "transformer_engine"


def start(plan: Plan, device: torch.device) -> None:
    """Make the buffers of messages that run under matrix products (overlap_tp). Collective;
    HostError without a GPU.
    """
    t = plan.topology
    if settings(plan)["transformer_impl"] != "local" and device.type != "cuda":
        asks = "Transformer Engine (precision=fp8, overlap_tp, run.fused=te)"
        raise HostError(f"device={device}: {asks} needs a GPU")
    if t.overlap_tp:
        from transformer_engine.pytorch.module import base

        modes = base.UserBufferQuantizationMode
        base.initialize_ub(
            shape=[plan.shape.seq_length * t.mbs // t.cp, plan.shape.hidden_size],
            tp_size=t.tp,
            quantization_modes=[modes.FP8 if t.precision == "fp8" else modes.NONE],
            ub_cfgs={},
            bootstrap_backend="nccl",
        )


class Core(layers.TEDotProductAttention):
    """Causal attention, (S, B, H, D) -> (S, B, H D), by the fastest kernel that is found; with cp >
    1 in a ring.
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return super().forward(query, key, value, None, AttnMaskType.causal)
