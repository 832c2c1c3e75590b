"""The order of samples, one for every engine and topology: megatron-core's GPT datasets for training and validation."""

import hashlib
import json
import math
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

from megatron.core.datasets.blended_dataset import BlendedDataset
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split

from trilane.config.plan import Plan
from trilane.engine.data.corpus import locked
from trilane.engine.data.text import tokenizer
from trilane.engine.distributed.world import World

Samples: TypeAlias = GPTDataset | BlendedDataset


def training_set(plan: Plan, world: World, prefixes: Sequence[str]) -> Samples:
    """The documents for training as plan.samples samples of seq_length + 1 tokens each."""
    return _built(plan, world, prefixes, Split.train, plan.samples)


def validation_set(plan: Plan, world: World, prefixes: Sequence[str]) -> Samples:
    """The documents for validation as the samples of one evaluation; in a small share some occur twice."""
    return _built(plan, world, prefixes, Split.valid, plan.validation_samples)


def _built(plan: Plan, world: World, prefixes: Sequence[str], part: Split, samples: int) -> Samples:
    """One part of the documents of the pairs as so many samples.

    Rank 0 builds megatron-core's sample index under a lock against other runs; the other ranks then map it. An index
    without the file `complete`, left by a killed run, is rebuilt.
    """
    cache = index_folder(plan, prefixes, part, samples)
    complete = cache / "complete"
    with locked(cache.with_name(cache.name + ".lock")) if world.is_first else nullcontext():
        if world.is_first and not complete.is_file():
            shutil.rmtree(cache, ignore_errors=True)
        sizes = [samples if split is part else 0 for split in Split]
        config = dataset_config(plan, prefixes, cache, part, samples)
        built = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()
        if world.is_first:
            complete.touch()
    return built[part.value]


def dataset_config(plan: Plan, prefixes: Sequence[str], cache: Path, part: Split, samples: int) -> GPTDatasetConfig:
    """megatron-core's dataset settings for one part alone: it would index the others too."""
    weights = [part.weight for part in plan.data.blend]
    config = GPTDatasetConfig(
        random_seed=plan.run.seed,
        sequence_length=plan.shape.seq_length,
        blend=(list(prefixes), weights or None),
        mid_level_dataset_surplus=surplus(weights, samples),
        split=plan.data.split or "1",
        path_to_cache=str(cache),
        tokenizer=tokenizer(plan.data.tokenizer),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    shares = zip(Split, config.split_matrix, strict=True)
    config.split_matrix = [share if split is part else None for split, share in shares]
    return config


def surplus(weights: Sequence[float], samples: int) -> float:
    """The surplus of samples prepared of each source, relative to its share.

    Half a percent, megatron-core's default, or more in short runs: it rounds the shares of n sources up to whole
    samples, so up to w n + 1 more are read of a source of weight w, and it fails where they do not exist.
    """
    total = sum(weights)
    shares = [weight / total for weight in weights]
    return max([0.005, *((share * len(shares) + 1) / math.ceil(share * samples) for share in shares)])


def index_folder(plan: Plan, prefixes: Sequence[str], part: Split, samples: int) -> Path:
    """The folder of one part's sample index, named by a hash of everything that determines the order."""
    pairs = [str(Path(prefix).resolve()) for prefix in prefixes]
    weights = [part.weight for part in plan.data.blend]
    order: list[Any] = [pairs, weights, plan.run.seed, plan.shape.seq_length, samples]
    order += [plan.data.split, part.name] if plan.data.split else []
    digest = hashlib.sha256(json.dumps(order).encode()).hexdigest()[:16]
    folder = Path(plan.data.folder)
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"samples-{digest}"
