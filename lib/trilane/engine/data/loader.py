"""Samples in one order for every engine and topology: megatron-core's GPT dataset, addressed by consumed samples."""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

from trilane.config.batch_rampup import Batch
from trilane.config.plan import Plan
from trilane.engine.data.corpus import locked, prepare_all
from trilane.engine.data.text import tokenizer
from trilane.engine.distributed.world import World, call_on_first
from trilane.engine.interface import Microbatch
from trilane.utils.validation import require


class SampleLoader:
    """The plan's samples. Sample k of the run is the same for every dp, mbs and engine."""

    def __init__(self, plan: Plan, world: World, replica: tuple[int, int]) -> None:
        self._topology, self._device = plan.topology, world.device
        self._replica, self._replicas = replica
        self._vocabulary = plan.shape.vocab_size
        self._samples = build_dataset(plan, world, shared_prefixes(plan, world))

    def microbatches(self, batch: Batch) -> list[Microbatch]:
        """This replica's share of the global batch, distributed as in Megatron-LM."""
        mbs, stride = self._topology.mbs, self._topology.mbs * self._replicas
        starts = range(batch.first + self._replica * mbs, batch.end, stride)
        return [self._microbatch(range(start, start + mbs)) for start in starts]

    def _microbatch(self, samples: range) -> Microbatch:
        rows = [self._samples[k] for k in samples]
        tokens, labels = (torch.stack([row[key] for row in rows]) for key in ("tokens", "labels"))
        # megatron-core's vocabulary-parallel embedding silently maps an id beyond the vocabulary to zeros.
        largest = int(torch.maximum(tokens.max(), labels.max()))
        require(largest < self._vocabulary, "data.source", f"token {largest}", f"vocab_size={self._vocabulary}")
        return Microbatch(tokens=tokens.to(self._device), labels=labels.to(self._device))


def shared_prefixes(plan: Plan, world: World) -> list[str]:
    """The prefixes of the pairs that rank 0 prepares, on all ranks; its ValueError is raised on every rank."""
    return call_on_first(world, lambda: prepare_all(plan.data, plan.shape))


def build_dataset(plan: Plan, world: World, prefixes: Sequence[str]) -> GPTDataset | BlendedDataset:
    """All documents of the pairs as one training set of plan.samples samples, seq_length + 1 tokens each.

    Rank 0 builds megatron-core's sample index under a lock against other runs; the other ranks then map it. An index
    without the file `complete`, left by a killed run, is rebuilt.
    """
    cache = index_folder(plan, prefixes)
    complete = cache / "complete"
    with locked(cache.with_name(cache.name + ".lock")) if world.is_first else nullcontext():
        if world.is_first and not complete.is_file():
            shutil.rmtree(cache, ignore_errors=True)
        sizes = [plan.samples, 0, 0]
        train, _, _ = BlendedMegatronDatasetBuilder(
            GPTDataset, sizes, lambda: True, dataset_config(plan, prefixes, cache)
        ).build()
        if world.is_first:
            complete.touch()
    return train


def dataset_config(plan: Plan, prefixes: Sequence[str], cache: Path) -> GPTDatasetConfig:
    """megatron-core's dataset settings; split "1" makes no validation and test sets."""
    weights = [part.weight for part in plan.data.blend]
    return GPTDatasetConfig(
        random_seed=plan.run.seed,
        sequence_length=plan.shape.seq_length,
        blend=(list(prefixes), weights or None),
        mid_level_dataset_surplus=surplus(weights, plan.samples),
        split="1",
        path_to_cache=str(cache),
        tokenizer=tokenizer(plan.data.tokenizer),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )


def surplus(weights: Sequence[float], samples: int) -> float:
    """The surplus of samples prepared of each source, relative to its share.

    Half a percent, megatron-core's default, or more in short runs: it rounds the shares of n sources up to whole
    samples, so up to w n + 1 more are read of a source of weight w, and it fails where they do not exist.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    return max([0.005, *((share * len(shares) + 1) / math.ceil(share * samples) for share in shares)])


def index_folder(plan: Plan, prefixes: Sequence[str]) -> Path:
    """The folder of the plan's sample index, named by a hash of everything that determines the order."""
    pairs = [str(Path(prefix).resolve()) for prefix in prefixes]
    weights = [part.weight for part in plan.data.blend]
    order = [pairs, weights, plan.run.seed, plan.shape.seq_length, plan.samples]
    digest = hashlib.sha256(json.dumps(order).encode()).hexdigest()[:16]
    folder = Path(plan.data.folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"samples-{digest}"
