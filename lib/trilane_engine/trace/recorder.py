"""Recorder: every operation of one rank as it runs, and the bytes that are alive, by what they are
for.
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
from torch.utils.flop_counter import flop_registry

from trilane.costmodel.trace import Pass
from trilane_engine import phases
from trilane_engine.patches import TorchDispatchMode, storage_key, tensors_of

STATES = ("weights", "gradients", "optimizer", "buffers")  # alive between iterations
ACTIVATIONS, TEMPORARY = "activations", "temporary"
PASSES = {
    phases.FORWARD: "forward",
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
aten: Any = torch.ops.aten
NO_KERNEL = {
    "empty",
    "empty_strided",
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "detach",
    "_unsafe_view",
    "set_",
}


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
        self._group_name, self._alive, self._references = (
            group_name,
            dict[int, Block](),
            dict[int, Any](),
        )
        self._parameters: list[torch.Tensor] = []
        self._zeros = set[int]()  # storages whose scalar must read 0: no gradient is infinite
        self._stops = phases.subscribe(self._phase_changed)
        self._now, self._hidden = "", False
        self.begin()

    def begin(self) -> None:
        """Begin an iteration: nothing is counted so far; what is alive and has no kind is a buffer."""
        self._blocks = [*self._alive.values()]
        for block in self._blocks:
            block.kind, block.born = block.kind if block.kind in STATES else "buffers", 0
        self.peak, self.peak_at, self._peak_time = 0, "", 0
        self._time, self._bytes = 0, sum(block.size for block in self._blocks)
        self.totals: Any = Counter()
        self.schedule = list[Pass]()  # totals: FLOPs, kernels, sent by kind and group
        self.each = dict[
            tuple[int, int], int
        ]()  # activations of a microbatch and chunk when its backward begins
        self._forwards, self._inside, self._passes = Counter[int](), (0, 0), 0
        self._begin_pass("")

    def held(self) -> Counter[str]:
        """The bytes of each kind that were alive at the peak."""
        found = Counter[str]()
        for block in self._blocks:
            found[block.kind] += block.size * (block.born <= self._peak_time < block.died)
        return found

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
            if block := self._alive.get(storage_key(tensor)):
                block.kind = kind

    # passes

    def _phase_changed(self, name: str) -> None:
        now = next((PASSES[name] for name in phases.within() if name in PASSES), "")
        if now != self._now:
            self._end_pass()
            self._begin_pass(now)

    def _begin_pass(self, kind: str) -> None:
        self._now, self._begun, self._pass_peak = kind, self.totals.copy(), 0
        self._passes += 1
        self._kept = Counter[tuple[int, int]]()
        for block in self._alive.values():
            self._kept[block.owner] += block.size * (block.kind == ACTIVATIONS)

    def _end_pass(self) -> None:
        """What a forward pass leaves alive is kept for its backward pass, but for weights that
        ZeRO-3 has gathered.
        """
        if self._now == "forward":
            gathered = {storage_key(parameter) for parameter in self._parameters}
            for number, block in self._alive.items():
                if block.inside == self._passes and block.kind == TEMPORARY:
                    block.kind, block.owner = (
                        ("buffers" if number in gathered else ACTIVATIONS),
                        self._inside,
                    )
        done = self.totals - self._begun
        if (
            self._now and done["operations"]
        ):  # DeepSpeed's step() after each microbatch does nothing
            microbatch, chunk = self._inside if self._now != "optimizer step" else (-1, 0)
            counted: Any = {
                "operations": done["operations"],
                "flops": done["flops"],
                "peak_bytes": self._pass_peak,
            }
            self.schedule.append(
                Pass(kind=self._now, microbatch=microbatch, chunk=chunk, **counted)
            )

    def _chunk_begins(self, chunk: int) -> None:
        if self._now == "forward":  # a recomputation calls no whole chunk
            self._inside = (self._forwards[chunk], chunk)
            self._forwards[chunk] += 1

    def _chunk_ends(self, module: Any, args: Any, out: Any) -> None:
        """The gradient of what a chunk returns, which may come after the loss's, names its backward
        pass.
        """
        owner = self._inside
        for made in tensors_of(out):
            if made.requires_grad:
                made.register_hook(lambda gradient: self._backward_of(owner))

    def _backward_of(self, owner: tuple[int, int]) -> None:
        self._inside = owner
        self.each.setdefault(owner, self._kept[owner])

    def _where(self) -> str:
        if self._now in ("forward", "backward"):
            microbatch, chunk = self._inside
            return f"{self._now} of microbatch {microbatch}" + f", chunk {chunk}" * (
                len(self._forwards) > 1
            )
        return self._now or phases.current() or "between passes"

    # operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim" or self._hidden:
            return func(*args, **(kwargs or {}))
        if func is aten._local_scalar_dense.default:
            return self._scalar(args[0])
        if func is aten.equal.default:
            return True
        out = func(*args, **(kwargs or {}))
        given = tensors_of((args, kwargs))
        if func.namespace == "c10d":
            self._collective(func, args, given)
        elif is_kernel(func):
            self.totals["operations"] += 1
            self.totals["flops"] += flops_of(func, args, kwargs or {}, out)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._zeros.add(storage_key(args[1]))
        if self._now == "forward":
            for block in (self._alive.get(storage_key(x)) for x in given):
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

    def _scalar(self, tensor: torch.Tensor) -> Any:
        """The value of a scalar: a constant's own; else 1, and 0 for whether a gradient is
        infinite.
        """
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            return constant.item()
        if not tensor.dtype.is_floating_point:
            return False if tensor.dtype == torch.bool else 0
        return float(storage_key(tensor) not in self._zeros)

    def _follow(self, made: Any) -> None:
        for tensor in tensors_of(made):
            number, storage = storage_key(tensor), tensor.untyped_storage()
            if number in self._alive:
                continue
            self._time += 1
            block = Block(storage.nbytes(), TEMPORARY, self._passes, not self._now, self._time)
            self._alive[number] = block
            self._blocks.append(block)
            self._references[number] = weakref.ref(storage, functools.partial(self._freed, number))
            self._bytes += block.size
            self._pass_peak = max(self._pass_peak, self._bytes)
            if self._bytes > self.peak:
                self.peak, self.peak_at, self._peak_time = self._bytes, self._where(), self._time

    def _freed(self, number: int, _: Any) -> None:
        block = self._alive.pop(number)
        del self._references[number]
        block.died = self._time + 1
        self._bytes -= block.size

    def _collective(self, func: Any, args: Any, given: list[torch.Tensor]) -> None:
        name = func.overloadpacket.__name__
        group = dist.ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject)))
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1 and name in COLLECTIVES:
            # of what is gathered or scattered the whole is the largest tensor, or the list of parts
            sizes = [x.numel() * x.element_size() for x in given]
            size = (
                max(max(sizes), sum(sizes) / 2)
                if name in ("allgather_", "reduce_scatter_")
                else max(sizes)
            )
            kind, known = COLLECTIVES[name], self._group_name(ranks)
            if kind in ("send", "receive"):  # neighbours may use the group of all ranks
                known = "pp"
            elif (
                kind == "all-reduce" and known == "pp" and size > 8
            ):  # its two ends, on two stages all of it
                known = "embedding"
            self.totals[kind, known, "count"] += 1
            self.totals[kind, known, "bytes"] += size


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
    if "attention" in name and "scaled_dot_product" in name:
        backward = "backward" in name
        query, keys = (args[1], args[2]) if backward else (args[0], args[1])
        return 4.0 * (1 + backward) * math.prod(query.shape) * keys.shape[2]
    formula = flop_registry.get(func.overloadpacket)
    return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
