"""A layer of one's own is tried out on random values before it is trained; what would train wrongly is named.

The process that prepares the data does so with one layer, each rank of a training with its own layers.
"""

from dataclasses import replace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from trilane.config.layer import Layer
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.engine.model import rng
from trilane.engine.model.gpt import fill_parameters, layer_spec, sum_over_tp, transformer_config
from trilane.engine.model.own_layer import Wrapped, own_spec, refused
from trilane.utils.validation import HostError


def is_divided(parameter: torch.nn.Parameter) -> bool:
    """Whether each tensor-parallel rank holds a part of the parameter."""
    return getattr(parameter, "tensor_model_parallel", False)


def try_out(plan: Plan, made: torch.nn.Module) -> None:
    """Run one layer forward and backward on random values, and restore it; HostError for what would train wrongly.

    Parameters that tensor-parallel ranks hold whole, each with a part of their gradient, as a norm of the heads of a
    rank, are found by their gradients, which then differ: from then on they are added up as they arrive.
    """
    layer = plan.layer
    assert layer is not None
    before, kept = rng.states(), [parameter.detach().clone() for parameter in made.parameters()]
    torch.manual_seed(plan.run.seed)
    _require_trainable(plan, layer, made)
    t, (device, dtype) = plan.topology, (kept[0].device, kept[0].dtype)
    size = (plan.shape.seq_length // (t.tp if t.sequence_parallel else 1), t.mbs, plan.shape.hidden_size)
    with torch.no_grad():
        for parameter in made.parameters():  # what starts at 0 would hide the gradients of the rest
            parameter.add_(0.1 * torch.randn(parameter.shape).to(parameter))
    given, weights = (torch.randn(size).to(device, dtype) for _ in range(2))
    given.requires_grad_()
    with refused(layer, "fails forward"):
        out = made(hidden_states=given * 1, attention_mask=None)
        out = out[0] if isinstance(out, tuple) else out
    _require(isinstance(out, torch.Tensor), layer, f"returns {type(out).__name__}, must return one tensor")
    found = (tuple(out.shape), out.dtype)
    _require(found == (size, dtype), layer, f"returns {found[0]} of {found[1]} for {size} of {dtype}")
    _require(bool(out.isfinite().all()), layer, "returns NaN or an infinite value for random values")
    _require(out.requires_grad, layer, "has no backward: its output does not depend on what autograd follows")
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
    """HostError for what can be seen without running it: nothing to train, or state that no checkpoint keeps."""
    named, tp = dict(made.named_parameters()), plan.topology.tp
    frozen = next((name for name, parameter in named.items() if not parameter.requires_grad), "")
    saved = next((name for name, _ in made.named_buffers() if name in made.state_dict()), "")
    _require(bool(named), layer, "has no parameters")
    _require(not frozen, layer, f"does not train {frozen}; make it a buffer with persistent=False")
    _require(not saved, layer, f"{saved} is state that no checkpoint keeps; register it with persistent=False")
    rule = f"ignores tp={tp}: each rank would compute all of it; divide it by megatron-core's ColumnParallelLinear"
    _require(tp == 1 or any(map(is_divided, named.values())), layer, f"{rule} and RowParallelLinear, or take tp=1")
    rule = f"would see a part of each sequence on cp={plan.topology.cp} ranks; take cp=1, or megatron-core's layer"
    _require(plan.topology.cp == 1 or not isinstance(made, Wrapped), layer, rule)
    whole = plan.topology.recompute == "selective" and isinstance(made, Wrapped)
    _require(not whole, layer, "is recomputed whole or not at all: recompute=full, block or none")


def _sum_where_partial(plan: Plan, layer: Layer, made: torch.nn.Module, out: torch.Tensor, given: torch.Tensor) -> None:
    """Let the gradients be added up of which each tensor-parallel rank has a part."""
    if plan.topology.tp == 1:
        return
    whole = {name: parameter for name, parameter in made.named_parameters() if not is_divided(parameter)}
    if plan.topology.sequence_parallel:  # each rank has seen its part of the sequence
        for parameter in whole.values():
            parameter.sequence_parallel = True  # type: ignore[attr-defined]
        return
    _require(not _differs(out), layer, "returns other values on each tensor-parallel rank: a reduce is missing")
    assert given.grad is not None
    rule = "the gradient of its input differs on each tensor-parallel rank: no copy_to_tensor_model_parallel_region"
    _require(not _differs(given.grad), layer, rule)
    for parameter in whole.values():
        assert parameter.grad is not None
        if _differs(parameter.grad):
            parameter.register_hook(sum_over_tp)


def _differs(values: torch.Tensor) -> bool:
    """Whether the values are not those of the group's first tensor-parallel rank, on any rank; collective."""
    group, values = parallel_state.get_tensor_model_parallel_group(), values.detach().float()
    first = values.clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group)
    # order and precision of sums may differ a little; what is computed of other heads differs much
    far = (values - first).abs().max() > 0.05 * first.abs().max()
    flag = far.int()
    dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag.item())


def rehearse(plan: Plan) -> None:
    """Try out the plan's first layer as one of its ranks, alone; ValueError where it would not train."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    # what a layer sees of the topology; the rest, as ZeRO and its overlaps, would not go with one replica
    names = ("tp", "mbs", "sequence_parallel", "recompute", "recompute_layers", "precision", "attention")
    t = Topology(gbs=plan.topology.mbs, **{name: getattr(plan.topology, name) for name in names})
    t = replace(t, precision="bf16") if t.precision == "fp8" else t  # Transformer Engine would want a GPU here
    plan = replace(plan, topology=t, run=replace(plan.run, fused="off"))
    # the messages to other ranks go nowhere, so that values are wrong and shapes are right
    dist.init_process_group("fake", rank=0, world_size=t.tp, store=FakeStore())
    parallel_state.initialize_model_parallel(t.tp, create_gloo_process_groups=False)
    rng.seed_streams(plan.run.seed)
    config = transformer_config(plan)
    try:
        spec = own_spec(plan, layer_spec(plan.shape, config))
        made = spec.module(config=config, layer_number=1, submodules=spec.submodules)
        fill_parameters(((f"decoder.layers.0.{name}", held) for name, held in made.named_parameters()), plan)
        try_out(plan, made.to(torch.cuda.current_device(), config.params_dtype))
    except HostError as error:
        raise ValueError(str(error)) from None
