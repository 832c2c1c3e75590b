"""The samples of each batch for this replica, addressed by consumed samples: the same for every engine and topology."""

from collections.abc import Iterator

import torch

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.engine.data.corpus import prepare_all
from trilane.engine.data.samples import Samples, training_set, validation_set
from trilane.engine.distributed.world import World, call_on_first
from trilane.engine.interface import Microbatch
from trilane.utils.validation import require


class SampleLoader:
    """The plan's samples. Sample k of the run is the same for every dp, mbs and engine."""

    def __init__(self, plan: Plan, world: World, replica: tuple[int, int]) -> None:
        self._topology, self._device = plan.topology, world.device
        self._replica, self._replicas = replica
        self._vocabulary = plan.shape.vocab_size
        prefixes, self._evaluations = shared_prefixes(plan, world), plan.run.eval_iters
        self._samples = training_set(plan, world, prefixes)
        self._held_out = validation_set(plan, world, prefixes) if self._evaluations else None

    def microbatches(self, batch: Batch) -> list[Microbatch]:
        """This replica's share of the global batch, distributed as in Megatron-LM."""
        return self._share(self._samples, batch.first, batch.end)

    def validation(self) -> Iterator[list[Microbatch]]:
        """This replica's share of each batch of an evaluation; the batches have topology.gbs samples."""
        gbs = self._topology.gbs
        for first in range(0, self._evaluations * gbs, gbs):
            assert self._held_out is not None
            yield self._share(self._held_out, first, first + gbs)

    def _share(self, samples: Samples, first: int, end: int) -> list[Microbatch]:
        mbs, stride = self._topology.mbs, self._topology.mbs * self._replicas
        starts = range(first + self._replica * mbs, end, stride)
        return [self._microbatch(samples, range(start, start + mbs)) for start in starts]

    def _microbatch(self, samples: Samples, numbers: range) -> Microbatch:
        rows = [samples[k] for k in numbers]
        tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
        # megatron-core's vocabulary-parallel embedding silently maps an id beyond the vocabulary to zeros.
        largest = int(torch.maximum(tokens.max(), labels.max()))
        require(largest < self._vocabulary, "data.source", f"token {largest}", f"vocab_size={self._vocabulary}")
        return Microbatch(tokens=tokens.to(self._device), labels=labels.to(self._device))


def shared_prefixes(plan: Plan, world: World) -> list[str]:
    """The prefixes of the pairs that rank 0 prepares, on all ranks; its ValueError is raised on every rank."""
    return call_on_first(world, lambda: prepare_all(plan.data, plan.shape))
