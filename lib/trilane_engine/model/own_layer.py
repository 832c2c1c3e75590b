"""A layer of one's own: loaded from the plan, and built as a layer of megatron-core's block.

It is a subclass of megatron-core's TransformerLayer, made as CLASS(config, submodules,
layer_number=...), or any module that is made as CLASS(config, layer_number) and maps (S, B, C) to
(S, B, C): S sequence (this rank's part of it), B microbatch, C hidden size. Before it is trained it
runs once on random values: one layer in the process that prepares the data, its own layers on each
rank. Left out: whether values are right under tensor parallelism, which the losses show.
"""

import contextlib
import copy
import hashlib
import importlib
import linecache
import sys
import traceback
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    BaseTransformerLayer,
    TransformerLayer,
    get_transformer_layer_offset,
)

from trilane.config.layer import Layer
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.utils.tables import short
from trilane.utils.validation import HostError, shown
from trilane_engine import patches
from trilane_engine.model import rng
from trilane_engine.model.fused import DTYPES
from trilane_engine.model.gpt import fill_parameters, layer_spec, sum_over_tp, transformer_config


class Wrapped(torch.nn.Module):
    """A module (S, B, C) -> (S, B, C) with the interface of megatron-core's layers."""

    def __init__(self, layer: torch.nn.Module, layer_number: int) -> None:
        super().__init__()
        self.layer = layer
        self.layer_number = layer_number

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return self.layer(hidden_states), None


def load(layer: Layer) -> type[torch.nn.Module]:
    """The class that a plan names; ValueError of one line where there is none."""
    where, _, name = layer.name.rpartition(":")
    with refused(layer, "cannot be imported"):
        if layer.source:
            module = sys.modules["trilane_layer"] = types.ModuleType("trilane_layer")
            # so that a traceback shows its lines
            lines = layer.source.splitlines(keepends=True)
            linecache.cache[where] = (len(layer.source), None, lines, where)
            exec(compile(layer.source, where, "exec"), vars(module))
        else:
            module = importlib.import_module(where)
    kind = getattr(module, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        raise ValueError(f"layer={layer.name}: {name} is no class of torch.nn.Module there")
    return kind


@contextlib.contextmanager
def refused(layer: Layer, what: str) -> Iterator[None]:
    """What the layer's own code raises, as one line of this rank."""
    try:
        yield
    except (Exception, SystemExit) as error:
        file = layer.name.rpartition(":")[0]
        line = ""
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == file:
                # of a cell the lines are counted without those that were left out
                line = f"line {frame.lineno}: {short(frame.line or '')}, "
        why = f"{line}{type(error).__name__}: {shown(error)}"
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
    ) -> torch.nn.Module:
        number = layer_number + get_transformer_layer_offset(config, groups.get("vp_stage"))
        before = rng.states()
        # what the class draws itself is the same on every topology
        digest = hashlib.sha256(f"{plan.run.seed}/layer {number}".encode()).hexdigest()
        torch.manual_seed(int(digest[:15], 16))
        config = copy.copy(config)  # the class may change it, for this layer alone
        config.perform_initialization = True  # it also marks what linear layers divide
        made: torch.nn.Module
        if issubclass(kind, TransformerLayer):
            with refused(layer, "cannot be made by (config, submodules, **options)"):
                parts = copy.deepcopy(submodules)
                made = kind(config, parts, layer_number=layer_number, **groups)
        else:
            with refused(layer, "cannot be made by (config, layer_number)"):
                made = Wrapped(kind(config, number), number)
        rng.restore(before)
        return made

    # megatron-core builds classes alone; this one's objects are those of make()
    built = type("OwnLayer", (BaseTransformerLayer,), {"__new__": make})
    return ModuleSpec(module=built, submodules=standard.submodules)


def try_out(plan: Plan, made: torch.nn.Module) -> None:
    """Run one layer forward and backward on random values, and restore it; HostError where it
    fails, or returns another shape or type.

    Parameters that tensor-parallel ranks hold whole, each with a part of their gradient, as a norm
    of the heads of a rank, show by gradients that differ: from then on these are added up.
    """
    layer = plan.layer
    assert layer is not None
    t = plan.topology
    _require_restorable(plan, layer, made)
    before = rng.states()
    kept = [parameter.detach().clone() for parameter in made.parameters()]
    torch.manual_seed(plan.run.seed)
    with torch.no_grad():
        for parameter in made.parameters():  # what starts at 0 would hide the gradients of the rest
            parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter))
    size = (plan.shape.seq_length // _parts(plan), t.mbs, plan.shape.hidden_size)
    dtype = DTYPES[t.precision]
    x = torch.randn(size).to(torch.cuda.current_device(), dtype).requires_grad_()
    with refused(layer, "fails"):
        out = made(hidden_states=x * 1, attention_mask=None)
    if isinstance(out, tuple):
        out = out[0]
    if not isinstance(out, torch.Tensor):
        _refuse(layer, f"returns {type(out).__name__}, must return one tensor")
    if out.shape != size or out.dtype != dtype:
        _refuse(layer, f"returns {tuple(out.shape)} of {out.dtype} for {size} of {dtype}")
    with refused(layer, "fails"):
        out.backward(torch.randn(size).to(out))
    for name, parameter in made.named_parameters():
        if parameter.grad is None:
            _refuse(layer, f"has no gradient for {name}")
        if not getattr(parameter, "tensor_model_parallel", False):
            _sum_where_partial(plan, parameter)
    with torch.no_grad():
        for parameter, value in zip(made.parameters(), kept, strict=True):
            parameter.copy_(value)
            parameter.grad = None
    rng.restore(before)


def _refuse(layer: Layer, rule: str) -> None:
    raise HostError(f"layer={layer.name}: {rule}")


def _parts(plan: Plan) -> int:
    """Among how many ranks a layer's sequence is divided."""
    return plan.topology.tp if plan.topology.sequence_parallel else 1


def _require_restorable(plan: Plan, layer: Layer, made: torch.nn.Module) -> None:
    """HostError for what would go wrong without a word: state that no checkpoint keeps, a part of
    each sequence.
    """
    held = made.state_dict()
    for name, _ in made.named_buffers():
        if name in held:
            rule = "is state that no checkpoint keeps; register it with persistent=False"
            _refuse(layer, f"{name} {rule}")
    if plan.topology.cp > 1 and isinstance(made, Wrapped):
        _refuse(layer, f"would see a part of each sequence on cp={plan.topology.cp} ranks")


def _sum_where_partial(plan: Plan, parameter: torch.nn.Parameter) -> None:
    """Let the gradient be added up of which each tensor-parallel rank has a part; collective."""
    if _parts(plan) > 1:  # each rank has seen its part of the sequence
        parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return
    assert parameter.grad is not None
    group = parallel_state.get_tensor_model_parallel_group()
    gradient = parameter.grad.float()
    first = gradient.clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group)
    # order and precision of sums may differ a little; what is computed of other heads differs much
    differs = ((gradient - first).abs().max() > 0.05 * first.abs().max()).int()
    dist.all_reduce(differs, dist.ReduceOp.MAX, group)
    if differs.item():
        parameter.register_hook(sum_over_tp)


def rehearse(plan: Plan) -> None:
    """Try out the plan's first layer as one of its ranks, alone; ValueError where it would not
    train.
    """
    # what a layer sees of the topology: with one replica the rest would not be valid
    seen = ("tp", "mbs", "sequence_parallel", "recompute", "recompute_layers", "attention")
    t = Topology(gbs=plan.topology.mbs, **{name: getattr(plan.topology, name) for name in seen})
    if plan.topology.precision != "fp8":  # which would want a GPU here
        t = replace(t, precision=plan.topology.precision)
    plan = replace(plan, topology=t, run=replace(plan.run, fused="off"))
    # the messages to other ranks go nowhere, so that values are wrong and shapes are right
    patches.join_fake_group(0, t.tp)
    parallel_state.initialize_model_parallel(t.tp, create_gloo_process_groups=False)
    rng.seed_streams(plan.run.seed)
    config = transformer_config(plan)
    try:
        spec = own_spec(plan, layer_spec(plan.shape, config))
        made = spec.module(config=config, layer_number=1, submodules=spec.submodules)
        named = ((f"decoder.layers.0.{name}", held) for name, held in made.named_parameters())
        fill_parameters(named, plan)
        try_out(plan, made.to(torch.cuda.current_device(), config.params_dtype))
    except HostError as error:
        raise ValueError(str(error)) from None
