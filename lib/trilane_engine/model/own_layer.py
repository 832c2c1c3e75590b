"""A layer of one's own: loaded from the plan, and built as a layer of megatron-core's block.

It is a subclass of megatron-core's TransformerLayer, made as CLASS(config, submodules,
layer_number=...), or any module that is made as CLASS(config, layer_number) and maps (S, B, C) to
(S, B, C): S sequence (this rank's part of it), B microbatch, C hidden size. It is tried out on
random values before it is trained, and what would train wrongly is named: one layer by the process
that prepares the data, its own layers by each rank of a training.
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
from trilane_engine.model.gpt import fill_parameters, layer_spec, sum_over_tp, transformer_config


class Wrapped(torch.nn.Module):
    """A module (S, B, C) -> (S, B, C) with the interface of megatron-core's layers."""

    def __init__(self, layer: torch.nn.Module, layer_number: int) -> None:
        super().__init__()
        self.layer, self.layer_number = layer, layer_number

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return self.layer(hidden_states), None


def load(layer: Layer) -> type[torch.nn.Module]:
    """The class that a plan names; ValueError of one line where there is none."""
    where, _, name = layer.name.rpartition(":")
    with refused(layer, "cannot be imported"):
        if layer.source:
            module = sys.modules["trilane_layer"] = types.ModuleType("trilane_layer")
            # so that a traceback shows its lines
            linecache.cache[where] = (
                len(layer.source),
                None,
                layer.source.splitlines(keepends=True),
                where,
            )
            exec(compile(layer.source, where, "exec"), vars(module))
        else:
            module = importlib.import_module(where)
    found = getattr(module, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.nn.Module)):
        raise ValueError(f"layer={layer.name}: {name} is no class of torch.nn.Module there")
    return found


@contextlib.contextmanager
def refused(layer: Layer, what: str) -> Iterator[None]:
    """What the layer's own code raises, as one line of this rank."""
    try:
        yield
    except (Exception, SystemExit) as error:
        file = layer.name.rpartition(":")[0]
        frames = [
            frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file
        ]
        # of a cell the lines are counted without those that were left out
        line = f"line {frames[-1].lineno}: {short(frames[-1].line or '')}, " if frames else ""
        # asked for by megatron-core 0.18 and newer; 0.16 and 0.17 train rightly without
        if "qk_layernorm" in str(error):
            what = "has norms of queries and keys, so it must set config.qk_layernorm = True"
        raise HostError(
            f"layer={layer.name}: {what} ({line}{type(error).__name__}: {shown(error)})"
        ) from None


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
        torch.manual_seed(
            int(hashlib.sha256(f"{plan.run.seed}/layer {number}".encode()).hexdigest()[:15], 16)
        )
        own, parts = (
            copy.copy(config),
            copy.deepcopy(submodules),
        )  # it may change both, for this layer alone
        own.perform_initialization = (
            True  # which also marks what megatron-core's linear layers divide
        )
        is_standard = issubclass(kind, TransformerLayer)
        with refused(
            layer,
            f"cannot be made by (config, {'submodules, **options' * is_standard or 'layer_number'})",
        ):
            if is_standard:
                made: torch.nn.Module = kind(own, parts, layer_number=layer_number, **groups)
            else:
                made = Wrapped(kind(own, number), number)
        rng.restore(before)
        return made

    # megatron-core builds classes alone; this one's objects are those of make()
    built = type("OwnLayer", (BaseTransformerLayer,), {"__new__": make})
    return ModuleSpec(module=built, submodules=standard.submodules)


def is_divided(parameter: torch.nn.Parameter) -> bool:
    """Whether each tensor-parallel rank holds a part of the parameter."""
    return getattr(parameter, "tensor_model_parallel", False)


def try_out(plan: Plan, made: torch.nn.Module) -> None:
    """Run one layer forward and backward on random values, and restore it; HostError for what would
    train wrongly.

    Parameters that tensor-parallel ranks hold whole, each with a part of their gradient, as a norm
    of the heads of a rank, are found by their gradients, which then differ: from then on they are
    added up as they arrive.
    """
    layer = plan.layer
    assert layer is not None
    before, kept = rng.states(), [parameter.detach().clone() for parameter in made.parameters()]
    torch.manual_seed(plan.run.seed)
    _require_trainable(plan, layer, made)
    t, (device, dtype) = plan.topology, (kept[0].device, kept[0].dtype)
    size = (
        plan.shape.seq_length // (t.tp if t.sequence_parallel else 1),
        t.mbs,
        plan.shape.hidden_size,
    )
    with torch.no_grad():
        for parameter in made.parameters():  # what starts at 0 would hide the gradients of the rest
            parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter))
    given, weights = (torch.randn(size).to(device, dtype) for _ in range(2))
    given.requires_grad_()
    with refused(layer, "fails forward"):
        out = made(hidden_states=given * 1, attention_mask=None)
        out = out[0] if isinstance(out, tuple) else out
    _require(
        isinstance(out, torch.Tensor),
        layer,
        f"returns {type(out).__name__}, must return one tensor",
    )
    found = (tuple(out.shape), out.dtype)
    _require(
        found == (size, dtype), layer, f"returns {found[0]} of {found[1]} for {size} of {dtype}"
    )
    _require(
        bool(out.isfinite().all()), layer, "returns NaN or an infinite value for random values"
    )
    _require(
        out.requires_grad,
        layer,
        "has no backward: its output does not depend on what autograd follows",
    )
    with refused(layer, "fails backward"):
        out.backward(weights)
    named = dict(made.named_parameters())
    lacking = next((name for name, parameter in named.items() if parameter.grad is None), "")
    _require(given.grad is not None, layer, "has no backward: no gradient comes to its input")
    _require(not lacking, layer, f"has no backward: no gradient comes to {lacking}")
    _sum_where_partial(plan, layer, made, out, given)
    with torch.no_grad():
        for parameter, value in zip(made.parameters(), kept, strict=True):
            parameter.copy_(value)
            parameter.grad = None
    rng.restore(before)


def _require(ok: bool, layer: Layer, rule: str) -> None:
    if not ok:
        raise HostError(f"layer={layer.name}: {rule}")


def _require_trainable(plan: Plan, layer: Layer, made: torch.nn.Module) -> None:
    """HostError for what can be seen without running it: nothing to train, or state that no
    checkpoint keeps.
    """
    named, tp = dict(made.named_parameters()), plan.topology.tp
    frozen = next((name for name, parameter in named.items() if not parameter.requires_grad), "")
    saved = next((name for name, _ in made.named_buffers() if name in made.state_dict()), "")
    _require(bool(named), layer, "has no parameters")
    _require(not frozen, layer, f"does not train {frozen}; make it a buffer with persistent=False")
    _require(
        not saved,
        layer,
        f"{saved} is state that no checkpoint keeps; register it with persistent=False",
    )
    rule = f"ignores tp={tp}: each rank would compute all of it; divide it by megatron-core's ColumnParallelLinear"
    _require(
        tp == 1 or any(map(is_divided, named.values())),
        layer,
        f"{rule} and RowParallelLinear, or take tp=1",
    )
    rule = f"would see a part of each sequence on cp={plan.topology.cp} ranks; take cp=1, or megatron-core's layer"
    _require(plan.topology.cp == 1 or not isinstance(made, Wrapped), layer, rule)
    whole = plan.topology.recompute == "selective" and isinstance(made, Wrapped)
    _require(not whole, layer, "is recomputed whole or not at all: recompute=full, block or none")


def _sum_where_partial(
    plan: Plan, layer: Layer, made: torch.nn.Module, out: torch.Tensor, given: torch.Tensor
) -> None:
    """Let the gradients be added up of which each tensor-parallel rank has a part."""
    if plan.topology.tp == 1:
        return
    whole = {
        name: parameter for name, parameter in made.named_parameters() if not is_divided(parameter)
    }
    if plan.topology.sequence_parallel:  # each rank has seen its part of the sequence
        for parameter in whole.values():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return
    _require(
        not _differs(out),
        layer,
        "returns other values on each tensor-parallel rank: a reduce is missing",
    )
    assert given.grad is not None
    rule = "the gradient of its input differs on each tensor-parallel rank: no copy_to_tensor_model_parallel_region"
    _require(not _differs(given.grad), layer, rule)
    for parameter in whole.values():
        assert parameter.grad is not None
        if _differs(parameter.grad):
            parameter.register_hook(sum_over_tp)


def _differs(values: torch.Tensor) -> bool:
    """Whether the values are not those of the group's first tensor-parallel rank, on any rank;
    collective.
    """
    group, values = parallel_state.get_tensor_model_parallel_group(), values.detach().float()
    first = values.clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group)
    # order and precision of sums may differ a little; what is computed of other heads differs much
    far = (values - first).abs().max() > 0.05 * first.abs().max()
    flag = far.int()
    dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag.item())


def rehearse(plan: Plan) -> None:
    """Try out the plan's first layer as one of its ranks, alone; ValueError where it would not
    train.
    """
    # what a layer sees of the topology; the rest, as ZeRO and its overlaps, would not go with one
    # replica
    names = (
        "tp",
        "mbs",
        "sequence_parallel",
        "recompute",
        "recompute_layers",
        "precision",
        "attention",
    )
    t = Topology(gbs=plan.topology.mbs, **{name: getattr(plan.topology, name) for name in names})
    t = (
        replace(t, precision="bf16") if t.precision == "fp8" else t
    )  # Transformer Engine would want a GPU here
    plan = replace(plan, topology=t, run=replace(plan.run, fused="off"))
    # the messages to other ranks go nowhere, so that values are wrong and shapes are right
    patches.join_fake_group(0, t.tp)
    parallel_state.initialize_model_parallel(t.tp, create_gloo_process_groups=False)
    rng.seed_streams(plan.run.seed)
    config = transformer_config(plan)
    try:
        spec = own_spec(plan, layer_spec(plan.shape, config))
        made = spec.module(config=config, layer_number=1, submodules=spec.submodules)
        fill_parameters(
            ((f"decoder.layers.0.{name}", held) for name, held in made.named_parameters()), plan
        )
        try_out(plan, made.to(torch.cuda.current_device(), config.params_dtype))
    except HostError as error:
        raise ValueError(str(error)) from None
