"""A layer of one's own: loaded from the plan, and built as a layer of megatron-core's block.

It is a subclass of megatron-core's TransformerLayer, made as CLASS(config, submodules,
layer_number=...), or any module that is made as CLASS(config, layer_number) and maps (S, B, C) to
(S, B, C): S sequence (this rank's part of it), B microbatch, C hidden size. Before a training each
rank runs its layers once on random values. Left out: whether values and gradients are right under
tensor parallelism, which the losses show; a layer itself sums gradients of which each rank has a
part.
"""

import contextlib
import copy
import hashlib
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    TransformerLayer,
    get_transformer_layer_offset,
)
from torch import Tensor, nn

from trilane.config.layer import Layer
from trilane.config.plan import Plan
from trilane.utils.validation import HostError, shown
from trilane_engine.model import rng
from trilane_engine.model.fused import DTYPES
from trilane_engine.model.gpt import INNER, sum_over_tp


class Wrapped(nn.Module):
    """A module (S, B, C) -> (S, B, C) with the interface of megatron-core's layers."""

    def __init__(self, layer: nn.Module, layer_number: int) -> None:
        super().__init__()
        self.layer = layer
        self.layer_number = layer_number

    def forward(self, hidden_states: Tensor, **_: Any) -> tuple[Tensor, None]:
        return self.layer(hidden_states), None


def load(layer: Layer) -> type[nn.Module]:
    """The class that a plan names; ValueError of one line where there is none."""
    where, _, name = layer.name.rpartition(":")
    with refused(layer, "cannot be imported"):
        module = sys.modules["trilane_layer"] = types.ModuleType("trilane_layer")
        exec(compile(layer.source, where, "exec"), vars(module))
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise ValueError(f"layer={layer.name}: {name} is no class of torch.nn.Module there")
    return kind


@contextlib.contextmanager
def refused(layer: Layer, what: str) -> Iterator[None]:
    """What the layer's own code raises, as one line of this rank."""
    try:
        yield
    except (Exception, SystemExit) as error:
        file = layer.name.rpartition(":")[0]
        why = f"{type(error).__name__}: {shown(error)}"
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == file:
                # of a cell the lines are counted without those that were left out
                why = f"line {frame.lineno}, {type(error).__name__}: {shown(error)}"
        raise HostError(f"layer={layer.name}: {what} ({why})") from None


def own_spec(plan: Plan, standard: ModuleSpec) -> ModuleSpec:
    """The plan's own layer in place of the `standard` one, whose parts a subclass of
    megatron-core's layer is given.
    """
    layer = plan.layer
    assert layer is not None
    kind = load(layer)

    def make(
        _: type, config: TransformerConfig, layer_number: int, submodules: Any, **groups: Any
    ) -> nn.Module:
        number = layer_number + get_transformer_layer_offset(config, groups.get("vp_stage"))
        before = rng.states()
        # what the class draws itself is the same on every topology
        digest = hashlib.sha256(f"{plan.run.seed}/layer {number}".encode()).hexdigest()
        torch.manual_seed(int(digest[:15], 16))
        config = copy.copy(config)  # the class may change it, for this layer alone
        config.perform_initialization = True  # it also marks what linear layers divide
        module: nn.Module
        with refused(layer, "cannot be made"):
            if issubclass(kind, TransformerLayer):
                parts = copy.deepcopy(submodules)
                module = kind(config, parts, layer_number=layer_number, **groups)
            else:
                module = Wrapped(kind(config, number), number)
        rng.restore(before)
        return module

    # megatron-core builds classes alone; this one's objects are those of make()
    built = type("OwnLayer", (BaseTransformerLayer,), {"__new__": make})
    return ModuleSpec(module=built, submodules=standard.submodules)


def try_out(plan: Plan, module: nn.Module) -> None:
    """Run one layer forward on random values; HostError where it fails or returns another shape or
    type, or where something would go wrong without a word.

    What tensor-parallel ranks hold whole, each with a part of the gradient, is summed from then on:
    under sequence parallelism all of it, else norms of queries and keys and what an activation
    has, by megatron-core's names.
    """
    layer = plan.layer
    assert layer is not None
    t = plan.topology
    held = module.state_dict()
    for name, _ in module.named_buffers():
        if name in held:
            rule = "is state that no checkpoint keeps; register it with persistent=False"
            _refuse(layer, f"{name} {rule}")
    if t.cp > 1 and isinstance(module, Wrapped):
        _refuse(layer, f"would see a part of each sequence on cp={t.cp} ranks")
    for name, parameter in module.named_parameters():
        if getattr(parameter, "tensor_model_parallel", False):
            continue
        if t.sequence_parallel:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        elif t.tp > 1 and INNER.search(name):
            parameter.register_hook(sum_over_tp)
    length = plan.shape.seq_length // (t.tp if t.sequence_parallel else 1)
    size = (length, t.mbs, plan.shape.hidden_size)
    dtype = DTYPES[t.precision]
    before = rng.states()
    torch.manual_seed(plan.run.seed)
    x = torch.randn(size).to(torch.cuda.current_device(), dtype).requires_grad_()
    with refused(layer, "fails"):
        out = module(hidden_states=x * 1, attention_mask=None)
    rng.restore(before)
    if isinstance(out, tuple):
        out = out[0]
    if not isinstance(out, Tensor) or out.shape != size or out.dtype != dtype:
        given = f"{tuple(out.shape)} of {out.dtype}" if isinstance(out, Tensor) else out
        _refuse(layer, f"returns {shown(given)}, must return {size} of {dtype}")


def _refuse(layer: Layer, rule: str) -> None:
    raise HostError(f"layer={layer.name}: {rule}")
