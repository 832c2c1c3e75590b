"""The samples of each batch for this replica, addressed by consumed samples: the same for every engine and topology."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.engine.data.corpus import prepare_all
from trilane.engine.data.samples import Samples, training_set, validation_set
from trilane.engine.distributed.world import World, call_on_first
from trilane.engine.interface import Microbatch
from trilane.utils.validation import require


class SampleLoader:
    """The plan's samples. Sample k of the run is the same for every dp, mbs and engine.

    One thread reads them, also ahead of time. A rank that does not read, on a middle stage of a pipeline, gets the same
    zeros for every microbatch, which no layer looks at.
    """

    def __init__(self, plan: Plan, world: World, replica: tuple[int, int], reads: bool = True) -> None:
        self._topology, self._device = plan.topology, world.device
        self._replica, self._replicas = replica
        self._vocabulary = plan.shape.vocab_size
        self.reads = reads
        prefixes, self._evaluations = shared_prefixes(plan, world), plan.run.eval_iters
        self._samples = training_set(plan, world, prefixes)
        self._held_out = validation_set(plan, world, prefixes) if self._evaluations else None
        blank = torch.zeros(plan.topology.mbs, plan.shape.seq_length, dtype=torch.int64, device=self._device)
        self._blank = Microbatch(tokens=blank, labels=blank)
        self._reader = ThreadPoolExecutor(1, "samples", initializer=self._begin_thread)
        self._ahead: tuple[Batch, Future[list[Microbatch]]] | None = None

    def microbatches(self, batch: Batch) -> list[Microbatch]:
        """This replica's share of the global batch, distributed as in Megatron-LM."""
        if self._ahead is None or self._ahead[0] != batch:
            self.read_ahead(batch)
        assert self._ahead
        return self._on_device(self._ahead[1].result())

    def read_ahead(self, batch: Batch | None) -> None:
        """Let the thread read the batch for which microbatches() will be called next."""
        if batch is not None and (self._ahead is None or self._ahead[0] != batch):
            self._ahead = (batch, self._reader.submit(self._share, self._samples, batch.first, batch.end))

    def validation(self) -> Iterator[list[Microbatch]]:
        """This replica's share of each batch of an evaluation; the batches have topology.gbs samples."""
        gbs = self._topology.gbs
        for first in range(0, self._evaluations * gbs, gbs):
            assert self._held_out is not None
            yield self._on_device(self._reader.submit(self._share, self._held_out, first, first + gbs).result())

    def _begin_thread(self) -> None:
        if self._device.type == "cuda":  # else page-locked memory would belong to the first card of the host
            torch.cuda.set_device(self._device)

    def _on_device(self, batch: list[Microbatch]) -> list[Microbatch]:
        """The microbatches on the device; from page-locked memory without waiting for it."""
        if self._device.type == "cpu" or not self.reads:
            return batch
        held = (
            (m.tokens.to(self._device, non_blocking=True), m.labels.to(self._device, non_blocking=True)) for m in batch
        )
        return [Microbatch(tokens=tokens, labels=labels) for tokens, labels in held]

    def _share(self, samples: Samples, first: int, end: int) -> list[Microbatch]:
        """In host memory, page-locked with a GPU."""
        mbs, stride = self._topology.mbs, self._topology.mbs * self._replicas
        starts = range(first + self._replica * mbs, end, stride)
        return [self._microbatch(samples, range(start, start + mbs)) if self.reads else self._blank for start in starts]

    def _microbatch(self, samples: Samples, numbers: range) -> Microbatch:
        rows = [samples[k] for k in numbers]
        tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
        # megatron-core's vocabulary-parallel embedding silently maps an id beyond the vocabulary to zeros.
        largest = int(torch.maximum(tokens.max(), labels.max()))
        require(largest < self._vocabulary, "data.source", f"token {largest}", f"vocab_size={self._vocabulary}")
        if self._device.type == "cuda":
            tokens, labels = tokens.pin_memory(), labels.pin_memory()
        return Microbatch(tokens=tokens, labels=labels)


def shared_prefixes(plan: Plan, world: World) -> list[str]:
    """The prefixes of the pairs that rank 0 prepares, on all ranks; its ValueError is raised on every rank."""
    return call_on_first(world, lambda: prepare_all(plan.data, plan.shape))
