"""The order of samples, one for every engine and topology (megatron-core's GPT datasets), and this
replica's share.
"""

import contextlib
import copy
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split, normalize
from torch.utils.data import ConcatDataset

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.utils.files import hash_of
from trilane.utils.validation import require
from trilane_engine.backends.base import Microbatch
from trilane_engine.data.corpus import locked, prepare_all, tokenizer
from trilane_engine.world import World, call_on_first

Samples: TypeAlias = "BlendedDataset | Epochs"


class SampleLoader:
    """The plan's samples, read ahead by a thread. Sample k of the run is the same for every dp, mbs
    and engine.
    """

    def __init__(self, plan: Plan, world: World, replica: tuple[int, int]) -> None:
        self._plan = plan
        self._device = world.device
        self._replica, self._replicas = replica
        prefixes = call_on_first(world, lambda: prepare_all(plan.data, plan.shape))
        self._samples = samples_of(plan, world, prefixes)
        if plan.run.eval_iters:
            self._held_out = samples_of(plan, world, prefixes, Split.valid)
        self._reader = ThreadPoolExecutor(1, "samples")
        self._ahead: tuple[Batch, Future[list[Microbatch]]] | None = None

    def microbatches(self, batch: Batch) -> list[Microbatch]:
        """This replica's share of the global batch, distributed as in Megatron-LM."""
        self.read_ahead(batch)
        assert self._ahead
        return self._on_device(self._ahead[1])

    def read_ahead(self, batch: Batch | None) -> None:
        """Let the thread read the batch for which microbatches() will be called next."""
        if batch is not None and (self._ahead is None or self._ahead[0] != batch):
            read = self._reader.submit(self._share, self._samples, batch.first, batch.end)
            self._ahead = (batch, read)

    def validation(self) -> Iterator[list[Microbatch]]:
        """This replica's share of each batch of an evaluation; the batches have topology.gbs
        samples.
        """
        gbs = self._plan.topology.gbs
        for first in range(0, self._plan.run.eval_iters * gbs, gbs):
            read = self._reader.submit(self._share, self._held_out, first, first + gbs)
            yield self._on_device(read)

    def _on_device(self, read: Future[list[Microbatch]]) -> list[Microbatch]:
        return [
            Microbatch(tokens=m.tokens.to(self._device), labels=m.labels.to(self._device))
            for m in read.result()
        ]

    def _share(self, samples: Samples, first: int, end: int) -> list[Microbatch]:
        mbs = self._plan.topology.mbs
        starts = range(first + self._replica * mbs, end, mbs * self._replicas)
        return [self._microbatch(samples, range(start, start + mbs)) for start in starts]

    def _microbatch(self, samples: Samples, numbers: range) -> Microbatch:
        rows = [samples[k] for k in numbers]
        tokens = torch.stack([row["tokens"] for row in rows])
        labels = torch.stack([row["labels"] for row in rows])
        # megatron-core's vocabulary-parallel embedding silently maps an id beyond the vocabulary to
        # zeros.
        largest = int(torch.maximum(tokens.max(), labels.max()))
        vocabulary = self._plan.shape.vocab_size
        require(largest < vocabulary, "data.source", f"token {largest}", f"vocab_size={vocabulary}")
        return Microbatch(tokens=tokens, labels=labels)


def samples_of(
    plan: Plan, world: World, prefixes: Sequence[str], part: Split = Split.train
) -> Samples:
    """The documents of a part as samples of seq_length + 1 tokens; no sample's place depends on
    their number.

    For validation those of one evaluation; in a small share some occur twice.
    """
    if part is Split.train:
        needed = plan.samples
    else:
        needed = plan.validation_samples
    cache = index_folder(plan, prefixes, part, needed)
    with _complete(cache, world):
        configs = [dataset_config(plan, prefix, cache, part) for prefix in prefixes]
        if not plan.data.blend:
            return Epochs(configs[0], part, needed)
        weights = normalize([source.weight for source in plan.data.blend])
        sources = []
        for config, weight in zip(configs, weights, strict=True):
            # A source of a blend is never more than one sample ahead of its share for each of
            # the others.
            count = math.ceil(weight * needed) + len(weights)
            sources.append(Epochs(config, part, count))
        return _dataset(BlendedDataset, sources, weights, needed, configs[0])


@contextlib.contextmanager
def _complete(cache: Path, world: World) -> Iterator[None]:
    """Build megatron-core's indices in `cache` inside the block: rank 0 under a lock, then the
    others map them.

    What a killed run left, without the file `complete`, is built again.
    """
    if not world.is_first:
        yield
        return
    with locked(cache.with_name(cache.name + ".lock")):
        if not (cache / "complete").is_file():
            shutil.rmtree(cache, ignore_errors=True)
        yield
        (cache / "complete").touch()


class Epochs(ConcatDataset[Any]):
    """The samples of one source: its first epoch, then further ones, shuffled by two, four, eight
    together.

    megatron-core would shuffle all epochs of a run together, so that the order depended on the
    run's length. Each part has a seed of its own.
    """

    def __init__(self, config: GPTDatasetConfig, part: Split, needed: int) -> None:
        none = [None] * len(Split)
        builder = BlendedMegatronDatasetBuilder(GPTDataset, none, lambda: True, config)
        first = builder.build()[part.value]
        source = (first.dataset, first.dataset_path, first.indices)
        parts = [first]
        while sum(map(len, parts)) < needed:
            seeded = copy.copy(config)  # `replace` would make the parts of the split anew
            seeded.random_seed = config.random_seed + len(parts)
            count = len(first) << len(parts)
            parts.append(_dataset(GPTDataset, *source, count, first.index_split, seeded))
        super().__init__(parts)
        self.index_split = first.index_split
        self.unique_identifiers = {"parts": [part.unique_identifiers for part in parts]}


def _dataset(kind: type, *arguments: Any) -> Any:
    """A dataset of megatron-core, whose indices rank 0 builds before the others map them."""
    return BlendedMegatronDatasetBuilder.build_generic_dataset(kind, lambda: True, True, *arguments)


def dataset_config(plan: Plan, prefix: str, cache: Path, part: Split) -> GPTDatasetConfig:
    """megatron-core's dataset settings for one part alone of one pair: it would index the others
    too.
    """
    config = GPTDatasetConfig(
        random_seed=plan.run.seed,
        sequence_length=plan.shape.seq_length,
        blend=([prefix], None),
        split=plan.data.split or "1",
        path_to_cache=str(cache),
        # asked for, and unused without what follows; a given pair may have no other
        tokenizer=tokenizer("bytes"),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    parts = zip(Split, config.split_matrix, strict=True)
    config.split_matrix = [share if split is part else None for split, share in parts]
    return config


def index_folder(plan: Plan, prefixes: Sequence[str], part: Split, needed: int) -> Path:
    """The folder of one part's sample index, named by a hash of everything that determines it."""
    pairs = [str(Path(prefix).resolve()) for prefix in prefixes]
    weights = [source.weight for source in plan.data.blend]
    facts = [pairs, weights, plan.run.seed, plan.shape.seq_length, needed]
    facts += [plan.data.split, part.name]
    folder = Path(plan.data.folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"samples-{hash_of(json.dumps(facts))}"
