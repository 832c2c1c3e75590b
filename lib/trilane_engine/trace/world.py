"""A fake world: this process as one rank of any number, on tensors with shapes and no memory, as on
the plan's card.

FakeTensorMode and the process group "fake" are torch's. The tensors are those of a CPU: a build of
torch without a GPU has no backward pass for fake CUDA tensors. What differs by device is replaced
by what CUDA runs. Nothing here is undone: the process ends with its trace.
"""

import importlib
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trilane.config.plan import Plan
from trilane_engine import patches
from trilane_engine.patches import storage_key, tree_map_only
from trilane_engine.trace.recorder import Recorder
from trilane_engine.world import World

aten: Any = torch.ops.aten


def prepare(plan: Plan) -> None:
    """Make this process, and those that it forks, a place without values; import the plan's engine.

    ValueError where an own layer's class cannot be found.
    """
    from trilane_engine.model import fused, gpt, own_layer, rng

    if plan.layer:
        own_layer.load(plan.layer)
    patches.put(gpt, fill=lambda parameter, draw: None)  # initial values: half of the time
    patches.put(own_layer, try_out=lambda plan, made: None)  # it looks at values
    patches.put(rng, states=dict, restore=lambda states: None)
    patches.without_values()
    if plan.engine != "megatron":
        t = plan.topology
        length = plan.shape.seq_length // (t.tp if t.sequence_parallel else 1)
        shape = [length, t.mbs, plan.shape.hidden_size]
        patches.without_messages(shape, fused.DTYPES[t.precision])
    if plan.shape.experts:
        patches.balance(plan.shape.experts, plan.shape.top_k)
    if plan.engine == "hf-zero3":
        patches.without_graph()
    importlib.import_module(f"trilane_engine.backends.{plan.engine.replace('-', '_')}")


def join(plan: Plan, rank: int, recorder: Recorder) -> World:
    """This process, prepared, as `rank` of the plan's ranks."""
    size = plan.topology.gpus
    each = plan.cluster.gpus_per_node
    place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % each, "LOCAL_WORLD_SIZE": each}
    os.environ.update({name: str(number) for name, number in place.items()})  # DeepSpeed reads them
    patches.join_fake_group(rank, size)
    if plan.cluster.gpu.kind == "cuda":
        _as_on_card(plan, recorder)
    return World(rank=rank, size=size, device=torch.device("cpu"))


# What a CPU computes in several steps, or keeps more of, and the kernel of CUDA that stands for it.
#
# F.rms_norm: on CUDA `_fused_rms_norm` keeps its input and one fp32 number a row; on a CPU it is a
# composite that keeps fp32 copies (aten/src/ATen/native/layer_norm.cpp). It has no kernel for fake
# CPU tensors: native_layer_norm stands for it, which keeps its input and, in 16 bits, two numbers a
# row. F.dropout: on CUDA `native_dropout` keeps a mask of bytes; on a CPU one of the input's
# precision (Dropout.cpp). F.scaled_dot_product_attention: flash, from Ampere on in 16 bits without
# a mask, keeps q, k, v, the output and a logsumexp of fp32; the memory-efficient kernel the same
# and the mask (transformers/cuda/attention.cu).


def rms_norm(
    x: Tensor, size: Any, weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    return torch.native_layer_norm(x, list(size), weight, None, eps or 1e-6)[0]


def dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if p and training:
        return torch.native_dropout(x, p, training)[0]
    return x


def attention(plain: Callable[..., Tensor], has_flash: bool) -> Callable[..., Tensor]:
    """scaled_dot_product_attention as torch chooses its kernel on the card; `plain` where neither
    fits.
    """

    def attend(
        q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: float = 0.0, **options: Any
    ) -> Tensor:
        causal = options.get("is_causal", False)
        # of a part of a sequence (context.causal_mask() on a CPU): CUDA's kernels have it as
        # `causal`
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = None
            causal = True
        fits = q.dtype != torch.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
        if has_flash and fits and attn_mask is None:
            return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, causal)[0]
        if q.shape[1] == k.shape[1]:
            keeps = torch.is_grad_enabled()
            return aten._scaled_dot_product_efficient_attention(
                q, k, v, attn_mask, keeps, dropout_p, causal
            )[0]
        return plain(q, k, v, attn_mask, dropout_p, **options)

    return attend


class _Compiled(torch.autograd.Function):
    """A function as one kernel, forward and backward.

    It keeps those of its inputs that its backward pass reads, and all of them where it would read
    what is between: that is computed again (torch's min_cut_rematerialization_partition, of
    pointwise functions). Masks of dropout are drawn again.
    """

    @staticmethod
    def forward(ctx: Any, recorder: Recorder, function: Callable[..., Any], *inputs: Any) -> Any:
        read = set[int]()  # no tensors: a graph's hook that holds its tensors is never freed
        with recorder.one_kernel() as finish:
            given = tree_map_only(
                Tensor, lambda x: x.detach().requires_grad_(x.requires_grad), inputs
            )

            def note(x: Tensor) -> None:
                if x.is_floating_point():
                    read.add(storage_key(x))

            hooks = torch.autograd.graph.saved_tensors_hooks(note, lambda x: x)
            with torch.enable_grad(), hooks:
                out = function(*given)
            out = tree_map_only(Tensor, Tensor.detach, out)
        finish(out)
        tensors = [x for x in inputs if isinstance(x, Tensor)]
        between = read - {storage_key(x) for x in tensors}
        ctx.save_for_backward(*(x for x in tensors if between or storage_key(x) in read))
        ctx.like = tree_map_only(Tensor, lambda x: (x.shape, x.dtype), inputs)
        ctx.recorder = recorder
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        with ctx.recorder.one_kernel() as finish:
            gradients_of: list[Tensor | None] = []
            for like, needs in zip(ctx.like, ctx.needs_input_grad[2:], strict=True):
                gradients_of.append(torch.empty(like[0], dtype=like[1]) if needs else None)
        finish(gradients_of)
        return None, None, *gradients_of


def _as_on_card(plan: Plan, recorder: Recorder) -> None:
    """Compute capability, kernels and compiled functions as those of the plan's card."""
    from trilane_engine.model import fused

    def compiled(function: Any = None, **_: Any) -> Any:
        """In place of torch.compile: a function of tensors is one kernel; what is no plain function
        stays as it is.
        """
        if not inspect.isfunction(function):
            return function
        return lambda *inputs: _Compiled.apply(recorder, function, *inputs)

    def copied(x: Tensor) -> Tensor:
        """To the host: one kernel, of which the card holds nothing."""
        with recorder.one_kernel():
            return x.clone()

    graph = torch.autograd.graph
    patches.put(graph, save_on_cpu=lambda **_: graph.saved_tensors_hooks(copied, torch.clone))
    card = plan.cluster.gpu.compute_capability
    patches.put(fused, capability=lambda device: card, COMPILE=compiled)
    attend = attention(F.scaled_dot_product_attention, has_flash=card >= (8, 0))
    patches.put(F, rms_norm=rms_norm, dropout=dropout, scaled_dot_product_attention=attend)
