"""Recorder: every operation of one rank as it runs, and the bytes that are alive, by what they are
for.

torch's own MemTracker takes no module of megatron-core's DDP, whose `buffers` is a list, and its
CommDebugMode counts calls without bytes and groups.
"""

import contextlib
import functools
import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from trilane.costmodel.trace import Pass
from trilane_engine import phases
from trilane_engine.patches import TorchDispatchMode, storage_key, tensors_of

STATES = ("weights", "gradients", "optimizer", "buffers")  # alive between iterations
ACTIVATIONS = "activations"
TEMPORARY = "temporary"
FORWARD = "forward"
PASSES = {
    phases.FORWARD: FORWARD,
    phases.BACKWARD: "backward",
    phases.OPTIMIZER: "optimizer step",
}
# c10d's operations and which of their tensors count: the one that is whole on each rank
COLLECTIVES = {
    "allreduce_": "all-reduce",
    "allreduce_coalesced_": "all-reduce",
    "_allgather_base_": "all-gather",
    "allgather_": "all-gather",
    "allgather_into_tensor_coalesced_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_": "reduce-scatter",
    "broadcast_": "broadcast",
    "alltoall_base_": "all-to-all",
    "send": "send",
    "recv_": "receive",
}
# groups that differ from others by what they are for, by megatron-core's names
GROUPS = {
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "etp-ep",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
}
aten: Any = torch.ops.aten
NO_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
NO_KERNEL |= {"detach", "_unsafe_view", "set_"}


@dataclass(eq=False)
class Block:
    """A storage: its bytes, what it is for, in which pass and microbatch, and when it is alive."""

    size: int
    kind: str
    inside: int  # number of the pass that made it, or that first read what was received
    received: bool  # made between passes
    born: int  # storages made until then, this one included
    died: float = math.inf
    owner: tuple[int, int] = (-1, -1)  # microbatch and chunk of activations


class Recorder(TorchDispatchMode):
    """While entered, follows all storages; operations, collectives and passes of the iteration
    since begin().

    A storage has one kind for all of its life in an iteration, so that what was alive at the peak
    is known at the end.
    """

    def __init__(self, group_name: Callable[[tuple[int, ...]], str]) -> None:
        super().__init__()
        self._group_name = group_name
        self._alive: dict[int, Block] = {}
        self._references: dict[int, Any] = {}
        self._parameters: list[Tensor] = []
        self._zeros: set[int] = set()  # storages whose scalar must read 0: no gradient is infinite
        self._now = ""
        self._hidden = False
        phases.subscribe(self._phase_changed)
        self.begin()

    def begin(self) -> None:
        """Begin an iteration: nothing is counted so far; what is alive and has no kind
        is a buffer.
        """
        self._blocks = [*self._alive.values()]
        for block in self._blocks:
            block.born = 0
            if block.kind not in STATES:
                block.kind = "buffers"
        self._time = 0
        self._bytes = sum(block.size for block in self._blocks)
        self.peak = 0
        self.peak_at = ""
        self._peak_time = 0
        self.totals: Any = Counter()  # FLOPs, kernels, sent by kind and group
        self.schedule: list[Pass] = []
        # activations of a microbatch and chunk when its backward begins
        self.each: dict[tuple[int, int], int] = {}
        self._forwards = Counter[int]()
        self._inside = (0, 0)
        self._passes = 0
        self._begin_pass("")

    def held(self) -> Counter[str]:
        """The bytes of each kind that were alive at the peak."""
        sizes = Counter[str]()
        for block in self._blocks:
            if block.born <= self._peak_time < block.died:
                sizes[block.kind] += block.size
        return sizes

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Name passes by the calls of these model chunks, and gradients as such when autograd has
        accumulated them.
        """
        for chunk, module in enumerate(modules):
            module.register_forward_pre_hook(lambda *_, chunk=chunk: self._chunk_begins(chunk))
            module.register_forward_hook(self._chunk_ends)
            for parameter in module.parameters():
                self._parameters.append(parameter)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(
                        lambda p: self.assign("gradients", p.grad)
                    )

    def assign(self, kind: str, *tensors: Any) -> None:
        """What the storages of these tensors, or trees of them, are for."""
        for tensor in tensors_of(tensors):
            block = self._alive.get(storage_key(tensor))
            if block:
                block.kind = kind

    # passes

    def _phase_changed(self, name: str) -> None:
        now = next((PASSES[name] for name in phases.within() if name in PASSES), "")
        if now != self._now:
            self._end_pass()
            self._begin_pass(now)

    def _begin_pass(self, kind: str) -> None:
        self._now = kind
        self._begun = self.totals["operations"]
        self._passes += 1
        self._kept = Counter[tuple[int, int]]()
        for block in self._alive.values():
            if block.kind == ACTIVATIONS:
                self._kept[block.owner] += block.size

    def _end_pass(self) -> None:
        """What a forward pass leaves alive is kept for its backward pass, but for weights that
        ZeRO-3 has gathered.
        """
        if self._now == FORWARD:
            gathered = {storage_key(parameter) for parameter in self._parameters}
            for number, block in self._alive.items():
                if block.inside == self._passes and block.kind == TEMPORARY:
                    block.kind = "buffers" if number in gathered else ACTIVATIONS
                    block.owner = self._inside
        # DeepSpeed's step() after each microbatch is empty
        if not self._now or self.totals["operations"] == self._begun:
            return
        microbatch, chunk = self._inside
        if self._now == PASSES[phases.OPTIMIZER]:
            microbatch = -1
            chunk = 0
        self.schedule.append(Pass(kind=self._now, microbatch=microbatch, chunk=chunk))

    def _chunk_begins(self, chunk: int) -> None:
        if self._now == FORWARD:  # a recomputation calls no whole chunk
            self._inside = (self._forwards[chunk], chunk)
            self._forwards[chunk] += 1

    def _chunk_ends(self, module: Any, args: Any, out: Any) -> None:
        """The gradient of what a chunk returns, which may come after the loss's, names its backward
        pass.
        """
        owner = self._inside
        for tensor in tensors_of(out):
            if tensor.requires_grad:
                tensor.register_hook(lambda gradient: self._backward_of(owner))

    def _backward_of(self, owner: tuple[int, int]) -> None:
        self._inside = owner
        self.each.setdefault(owner, self._kept[owner])

    # operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "prim" or self._hidden:
            return func(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if func is aten.equal.default:
            return True
        out = func(*args, **kwargs)
        given = tensors_of((args, kwargs))
        if func.namespace == "c10d":
            self._collective(func, args, given)
        elif is_kernel(func):
            self.totals["operations"] += 1
            self.totals["flops"] += flops_of(func, args, kwargs, out)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._zeros.add(storage_key(args[1]))
        if self._now == FORWARD:
            for tensor in given:
                block = self._alive.get(storage_key(tensor))
                if block and block.received and block.kind == TEMPORARY:
                    block.inside = self._passes
        self._follow(out)
        return out

    @contextlib.contextmanager
    def one_kernel(self) -> Iterator[Callable[[Any], None]]:
        """A block of operations that is one kernel: of what it makes only what is given to the
        result is followed.
        """
        self._hidden = True
        yield self._follow
        self._hidden = False
        self.totals["operations"] += 1

    def _scalar(self, tensor: Tensor) -> Any:
        """The value of a scalar: a constant's own; else 1, and 0 for whether a gradient is
        infinite.
        """
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            return constant.item()
        if not tensor.dtype.is_floating_point:
            if tensor.dtype == torch.bool:
                return False
            return 0
        return float(storage_key(tensor) not in self._zeros)

    def _follow(self, tree: Any) -> None:
        for tensor in tensors_of(tree):
            number = storage_key(tensor)
            if number in self._alive:
                continue
            storage = tensor.untyped_storage()
            self._time += 1
            block = Block(storage.nbytes(), TEMPORARY, self._passes, not self._now, self._time)
            self._alive[number] = block
            self._blocks.append(block)
            self._references[number] = weakref.ref(storage, functools.partial(self._freed, number))
            self._bytes += block.size
            if self._bytes > self.peak:
                self.peak = self._bytes
                self.peak_at = self._now or phases.current() or "time between passes"
                self._peak_time = self._time

    def _freed(self, number: int, _: Any) -> None:
        block = self._alive.pop(number)
        del self._references[number]
        block.died = self._time + 1
        self._bytes -= block.size

    def _collective(self, func: Any, args: Any, given: list[Tensor]) -> None:
        name = func.overloadpacket.__name__
        group = dist.ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject)))
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) == 1 or name not in COLLECTIVES:
            return
        kind = COLLECTIVES[name]
        sizes = [x.numel() * x.element_size() for x in given]
        size: float = max(sizes)
        if name in ("allgather_", "reduce_scatter_"):
            # the whole is the largest tensor, or the list of parts
            size = max(size, sum(sizes) / 2)
        group_name = GROUPS.get(group.group_desc) or self._group_name(ranks)
        if kind in ("send", "receive"):  # neighbours may use the group of all ranks
            group_name = "pp"
        self.totals[kind, group_name, "count"] += 1
        self.totals[kind, group_name, "bytes"] += size


@functools.cache
def is_kernel(func: Any) -> bool:
    """Whether an operation starts a kernel: neither a view nor memory alone."""
    return not func.is_view and func.overloadpacket.__name__ not in NO_KERNEL


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Of matrix products by torch's formulas; of attention 4 b a s^2 d forward and twice as much
    backward.

    It counts whole though it is causal, and the scores that a backward kernel computes again do
    not, as in the formulas of costmodel/layers.py. Everything else counts 0.
    """
    name = func.name()
    if "scaled_dot_product" in name and "attention" in name:
        if "backward" in name:  # after the gradient
            return 8.0 * math.prod(args[1].shape) * args[2].shape[2]
        return 4.0 * math.prod(args[0].shape) * args[1].shape[2]
    formula = flop_registry.get(func.overloadpacket)
    if formula:
        return float(formula(*args, **kwargs, out_val=out))
    return 0.0
