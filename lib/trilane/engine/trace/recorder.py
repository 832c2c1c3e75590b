"""Recorder: every operation of one rank as it runs, and the bytes that are alive, by what they are for."""

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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trilane.costmodel.trace import Pass
from trilane.engine import phases

STATES = ("weights", "gradients", "optimizer", "buffers")  # alive between iterations
ACTIVATIONS, RECEIVED, TEMPORARY = "activations", "received", "temporary"
PASSES = {phases.FORWARD: "forward", phases.BACKWARD: "backward", phases.OPTIMIZER: "optimizer step"}
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
NO_KERNEL = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "_unsafe_view", "set_"}


@dataclass
class Block:
    """A storage that is alive: bytes, what it is for, and of which pass."""

    size: int
    kind: str
    made: int  # operations before it
    owner: tuple[int, int] = (-1, -1)  # microbatch and chunk of activations


class Recorder(TorchDispatchMode):
    """While entered, follows all storages; operations, collectives and passes of the iteration since begin()."""

    def __init__(self, group_names: dict[tuple[int, ...], str]) -> None:
        super().__init__()
        self._groups, self._blocks, self._references = group_names, dict[int, Block](), dict[int, Any]()
        self._parameters: list[torch.Tensor] = []
        self._zeros = set[int]()  # storages whose scalar must read 0: no gradient is infinite
        self._stops = phases.subscribe(self._phase_changed)
        self._now, self._inside, self._hidden = "", (0, 0), False
        self.begin()

    def begin(self) -> None:
        """Begin an iteration: nothing is counted so far; what is alive and has no kind is a buffer."""
        self.live = Counter[str]()
        for block in self._blocks.values():
            block.kind = block.kind if block.kind in STATES else "buffers"
            self.live[block.kind] += block.size
        self.peak, self.peak_at, self.at_peak, self._peak_made = 0, "", Counter[str](), 0
        self.flops, self.operations, self.schedule = 0.0, 0, list[Pass]()
        self.sent, self.owners = dict[tuple[str, str], tuple[int, float]](), Counter[tuple[int, int]]()
        self.each = dict[tuple[int, int], int]()  # activations of a microbatch and chunk when its backward begins
        self.spared = Counter[tuple[int, int]]()  # what a CPU's kernels would keep more, by microbatch and chunk
        self._forwards, self._inside = Counter[int](), (0, 0)
        self._begin_pass("")

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """Name passes by the calls of these model chunks, and gradients as such when autograd has accumulated them."""
        for chunk, module in enumerate(modules):
            module.register_forward_pre_hook(lambda *_, chunk=chunk: self._chunk_begins(chunk))
            module.register_forward_hook(self._chunk_ends)
            for parameter in module.parameters():
                self._parameters.append(parameter)
                if parameter.requires_grad:
                    parameter.register_post_accumulate_grad_hook(self._accumulated)

    def assign(self, kind: str, tensors: Iterable[Any]) -> None:
        """What these tensors' storages are for, from now on."""
        for tensor in tensors:
            block = self._blocks.get(key(tensor)) if isinstance(tensor, torch.Tensor) else None
            if block:
                self._become(block, kind)

    def _become(self, block: Block, kind: str) -> None:
        self.live[block.kind] -= block.size
        self.live[kind] += block.size
        if block.kind == ACTIVATIONS:
            self.owners[block.owner] -= block.size
        block.kind = kind

    # passes

    def _phase_changed(self, name: str) -> None:
        now = next((PASSES[name] for name in phases.within() if name in PASSES), "")
        if now != self._now:
            self._end_pass()
            self._begin_pass(now)

    def _begin_pass(self, kind: str) -> None:
        self._now, self._begun, self._pass_peak = kind, (self.flops, self.operations), 0
        self._made, self._kept = list[int](), Counter(self.owners)

    def _end_pass(self) -> None:
        if self._now == "forward":
            self._keep_activations()
        if self._now and self.operations > self._begun[1]:  # DeepSpeed's step() after each microbatch does nothing
            microbatch, chunk = self._inside if self._now != "optimizer step" else (-1, 0)
            flops, operations = self.flops - self._begun[0], self.operations - self._begun[1]
            where = {"microbatch": microbatch, "chunk": chunk, "operations": operations}
            self.schedule.append(Pass(kind=self._now, **where, flops=flops, peak_bytes=self._pass_peak))

    def _keep_activations(self) -> None:
        """What the forward pass that ends has made and left alive is kept for its backward pass."""
        gathered = {key(parameter) for parameter in self._parameters}  # by ZeRO-3
        for block, number in ((self._blocks.get(number), number) for number in self._made):
            if block and block.kind in (TEMPORARY, RECEIVED):
                kind = "buffers" if number in gathered else ACTIVATIONS
                if self.peak_at == self._where() and block.made <= self._peak_made:
                    self.at_peak[block.kind] -= block.size
                    self.at_peak[kind] += block.size
                self._become(block, kind)
                if kind == ACTIVATIONS:
                    block.owner = self._inside
                    self.owners[self._inside] += block.size

    def _chunk_begins(self, chunk: int) -> None:
        if self._now == "forward":  # a recomputation calls no whole chunk
            self._inside = (self._forwards[chunk], chunk)
            self._forwards[chunk] += 1

    def _chunk_ends(self, module: Any, args: Any, out: Any) -> None:
        """The gradient of what a chunk returns, which may come after the loss's, names its backward pass."""
        owner = self._inside
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor) and made.requires_grad:
                made.register_hook(lambda gradient: self._backward_of(owner))

    def _backward_of(self, owner: tuple[int, int]) -> None:
        self._inside = owner
        self.each.setdefault(owner, self._kept[owner])

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self.assign("gradients", [parameter.grad])

    def _where(self) -> str:
        if self._now in ("forward", "backward"):
            microbatch, chunk = self._inside
            return f"{self._now} of microbatch {microbatch}" + f", chunk {chunk}" * (len(self._forwards) > 1)
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
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func.namespace == "c10d":
            self._collective(func, args, given)
        elif is_kernel(func):
            self.operations += 1
            self.flops += flops_of(func, args, kwargs or {}, out)
        if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
            self._zeros.add(key(args[1]))
        if self._now == "forward" and self.live[RECEIVED]:
            self._made += [number for x in given if self._is_received(number := key(x))]
        self._follow_all(out)
        return out

    def _follow_all(self, out: Any) -> None:
        for made in tree_leaves(out):
            if isinstance(made, torch.Tensor):
                self._follow(made)

    @contextlib.contextmanager
    def one_kernel(self) -> Iterator[Callable[[Any], None]]:
        """A block of operations that is one kernel: of what it makes only what is given to the result is followed."""
        self._hidden = True
        yield self._follow_all
        self._hidden = False
        self.operations += 1

    def spare(self, size: int) -> None:
        """A CPU's kernel would have kept `size` bytes more of the forward pass that this is in."""
        if self._now == "forward":
            self.spared[self._inside] += size

    def _is_received(self, number: int) -> bool:
        block = self._blocks.get(number)
        return block is not None and block.kind == RECEIVED

    def _scalar(self, tensor: torch.Tensor) -> Any:
        """The value of a scalar: a constant's own; else 1, and 0 for whether a gradient is infinite."""
        constant = getattr(tensor, "constant", None)
        if constant is not None:
            return constant.item()
        if not tensor.dtype.is_floating_point:
            return False if tensor.dtype == torch.bool else 0
        return float(key(tensor) not in self._zeros)

    def _follow(self, tensor: torch.Tensor) -> None:
        number = key(tensor)
        if number in self._blocks:
            return
        storage = tensor.untyped_storage()
        kind = TEMPORARY if self._now else RECEIVED
        block = self._blocks[number] = Block(storage.nbytes(), kind, self.operations)
        self._references[number] = weakref.ref(storage, functools.partial(self._freed, number))
        self._made.append(number)
        self.live[kind] += block.size
        alive = sum(self.live.values())
        self._pass_peak = max(self._pass_peak, alive)
        if alive > self.peak:
            self.peak, self.peak_at, self.at_peak = alive, self._where(), Counter(self.live)
            self._peak_made = self.operations
            self.at_peak["cpu_only"] = sum(size for owner, size in self.spared.items() if self.owners[owner])

    def _freed(self, number: int, _: Any) -> None:
        block = self._blocks.pop(number)
        del self._references[number]
        self.live[block.kind] -= block.size
        if block.kind == ACTIVATIONS:
            self.owners[block.owner] -= block.size

    def _collective(self, func: Any, args: Any, given: list[torch.Tensor]) -> None:
        name = func._schema.name.partition("::")[2]
        group = dist.ProcessGroup.unbox(next(x for x in args if isinstance(x, torch.ScriptObject)))
        ranks = tuple(dist.get_process_group_ranks(group))
        if len(ranks) > 1 and name in COLLECTIVES:
            # of what is gathered or scattered the whole is the largest tensor, or the list of parts
            sizes = [x.numel() * x.element_size() for x in given]
            size = max(max(sizes), sum(sizes) / 2) if name in ("allgather_", "reduce_scatter_") else max(sizes)
            kind, known = COLLECTIVES[name], self._groups.get(ranks, f"{len(ranks)} ranks")
            # neighbours may use the group of all ranks; on two stages the embedding's group has the ranks of pp
            known = "pp" if kind in ("send", "receive") else known
            entry = kind, "embedding" if known == "pp" and kind == "all-reduce" and size > 8 else known
            count, total = self.sent.get(entry, (0, 0.0))
            self.sent[entry] = count + 1, total + size


def key(tensor: torch.Tensor) -> int:
    """What tells a storage from others that are alive."""
    return tensor.untyped_storage()._cdata


@functools.cache
def is_kernel(func: Any) -> bool:
    """Whether an operation starts a kernel: neither a view nor memory alone."""
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
    return not views and func._schema.name.partition("::")[2] not in NO_KERNEL


def flops_of(func: Any, args: Any, kwargs: Any, out: Any) -> float:
    """Of matrix products by torch's formulas; of attention 4 b a s^2 d forward and twice as much backward.

    It counts whole though it is causal, and the scores that a backward kernel computes again do not, as in the
    formulas of costmodel/layers.py. Everything else counts 0.
    """
    name = func._schema.name
    if "attention" in name and "scaled_dot_product" in name:
        backward = "backward" in name
        query, keys = (args[1], args[2]) if backward else (args[0], args[1])
        return 4.0 * (1 + backward) * math.prod(query.shape) * keys.shape[2]
    formula = flop_registry.get(func._overloadpacket)
    return float(formula(*args, **kwargs, out_val=out)) if formula else 0.0
