"""The first value of an iteration that is not finite: its batch is repeated once, with hooks that
look at all tensors.

Looked at are what modules take and give, and the gradients of both: nothing between the operations
inside a module.
"""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.utils import unwrap_model

from trilane_engine import patches
from trilane_engine.model.gpt import whole_name

Pass = tuple[int, int, bool]  # through a chunk of the model, by a microbatch, backward


class Seen(NamedTuple):
    """A value that is not finite. The least is the first in the dataflow of the first microbatch
    that has one.

    Where several ranks see it in one place, as a sum over tensor ranks reaches all, it is the one
    with bad weights.
    """

    microbatch: int
    backward: bool
    place: int  # of the chunk among those of all stages, in the order of the pass
    order: int  # of the tensor among those that the rank has looked at
    by_data: bool  # the weights of the module are finite
    rank: int
    text: str


UNSEEN = Seen(
    1 << 40,
    True,
    0,
    0,
    True,
    0,
    "repeated, the batch is finite everywhere: a fault of a device or link?",
)


def first_of(chunks: Sequence[torch.nn.Module], repeat: Callable[[], object]) -> str:
    """Where a value arises that is not finite, while `repeat()` computes the batch's gradients
    again; collective.

    `chunks` are this rank's of the model.
    """
    watch = Watch(chunks, dist.get_rank())
    # what is compiled calls no hooks
    with watch.hooks(), torch.compiler.set_stance("force_eager"), torch.enable_grad():
        repeat()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, tuple(min(watch.first, watch.of_weights())))
    return Seen(*min(found)).text


class Watch:
    """What hooks on the modules of this rank's chunks have seen."""

    def __init__(self, chunks: Sequence[torch.nn.Module], rank: int) -> None:
        self._chunks, self._rank, self.first = chunks, rank, UNSEEN
        self._forward, self._backward = (
            [-1] * len(chunks),
            [0] * len(chunks),
        )  # the microbatch in each chunk
        self._looked, self._largest = 0, dict[Pass, tuple[float, str]]()  # and in which value

    @contextlib.contextmanager
    def hooks(self) -> Iterator[None]:
        """Look at everything as long as the block lasts."""
        with contextlib.ExitStack() as stack:
            for number, chunk in enumerate(self._chunks):
                stack.enter_context(chunk.register_forward_pre_hook(partial(self._begin, number)))
                for name, module in named(chunk):
                    takes, gives = (
                        partial(self._see, number, f"the {word} of {name}")
                        for word in ("input", "output")
                    )
                    stack.enter_context(module.register_forward_pre_hook(takes, with_kwargs=True))
                    hook = module.register_forward_hook(
                        lambda m, _, given, gives=gives: gives(m, given)
                    )
                    stack.enter_context(hook)
            yield

    def of_weights(self) -> Seen:
        """A sum of weight gradients that is not finite, of which no single value was."""
        for number, chunk in enumerate(self._chunks):
            for name, weight in chunk.named_parameters():
                gradient = getattr(weight, "main_grad", weight.grad)
                if gradient is not None and not math.isfinite(largest(gradient)):
                    text = f"{kind(gradient)} in the gradient of {name}, summed over microbatches and replicas"
                    return UNSEEN._replace(
                        microbatch=UNSEEN.microbatch - 1, order=number, rank=self._rank, text=text
                    )
        return UNSEEN

    def _begin(self, number: int, *_: Any) -> None:
        self._forward[number] += 1

    def _see(self, number: int, what: str, module: torch.nn.Module, *values: Any) -> None:
        """Look at the tensors that a module takes or gives now, and at their gradients when they
        come.
        """
        again = patches.runs_backward()  # it recomputes a forward pass
        microbatch = (self._backward if again else self._forward)[number]
        for tensor in patches.tensors_of(values):
            # a tied head takes its weight, whose gradients are those of all microbatches
            if tensor.is_floating_point() and not isinstance(tensor, torch.nn.Parameter):
                self._look((number, microbatch, False), what, module, tensor)
                if tensor.requires_grad:
                    gradient = f"the gradient of {what}"
                    tensor.register_hook(
                        partial(self._look, (number, microbatch, True), gradient, module)
                    )

    def _look(self, at: Pass, what: str, module: torch.nn.Module, tensor: torch.Tensor) -> None:
        """Keep the largest value, or the first that is not finite."""
        number, microbatch, backward = at
        if backward:
            self._backward[number] = microbatch
        self._looked += 1
        before = self._largest.get(at, (0.0, "none"))
        if math.isfinite(size := largest(tensor)):
            self._largest[at] = max(before, (size, what))
            return
        bad = [
            name
            for name, weight in module.named_parameters(recurse=False)
            if not math.isfinite(largest(weight))
        ]
        seen = Seen(
            microbatch, backward, _place(number, backward), self._looked, not bad, self._rank, ""
        )
        if seen < self.first:
            most = f"the largest before it is {before[0]:.3g} in {before[1]}"
            limit = f"{str(tensor.dtype).removeprefix('torch.')} ends at {torch.finfo(tensor.dtype).max:.3g}"
            why = f"its {bad[0]} is not finite" if bad else f"{most}; {limit}"
            where = f"{'backward' if backward else 'forward'} pass of microbatch {microbatch} on rank {self._rank}"
            self.first = seen._replace(text=f"{kind(tensor)} in {what}, {where}: {why}")


def _place(number: int, backward: bool) -> int:
    """Of this rank's chunk among those of all stages: forward from the first, backward from the
    last.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    place = number * stages + parallel_state.get_pipeline_model_parallel_rank()
    return -place if backward else place


def named(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules of the model in a chunk by their names, layers counted from 0 over all stages."""
    model: Any = unwrap_model(chunk)  # of DDP, and of half precision
    for name, module in model.named_modules():
        if name:
            yield whole_name(model, name), module


def largest(tensor: torch.Tensor) -> float:
    """The largest magnitude, inf or NaN where a value is; 0 of none."""
    return torch.linalg.vector_norm(tensor.detach(), math.inf).item() if tensor.numel() else 0.0


def kind(tensor: torch.Tensor) -> str:
    """What is not finite in a tensor."""
    return "NaN" if tensor.isnan().any() else "Inf"
