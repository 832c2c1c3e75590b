#!/usr/bin/env bash
# megatron-core 0.16.1, torch 2.13.0, Linux x86_64, Python 3.10 to 3.13, no GPU; seen 2026-11-28 on
# Python 3.11, and the same with megatron-core 0.19.2 on Python 3.12.
#
# One would guess: the order of samples follows from data, seed and sequence length. A run that is
# resumed with a larger --train-iters goes on where it stopped: what was read is not read again
# before the rest.
# What happens: the number of epochs that the samples asked for need is part of the shuffle. One
# sample more, over the end of an epoch, and all samples are others from the first on; the resumed
# run skips "consumed" samples of an order that it never read.
#     20 documents, 24 samples an epoch: asking for 10, 20 or 24 gives one order; 25 gives
#     another, with 1 of the first 10 samples in its place
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 megatron-core==0.16.1

cat >"$T/probe.py" <<'PY'
import sys
from types import SimpleNamespace

import numpy
import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

prefix = sys.argv[1] + "/corpus"
builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.int32)
for document in range(1, 21):
    builder.add_document(torch.full((5,), document), [5])
builder.finalize(prefix + ".idx")


tokenizer = SimpleNamespace(unique_identifiers={"class": "none"}, eod=0, pad=0, vocab_size=128)


def order(samples):
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=4,
        blend=([prefix], None),
        split="1",
        tokenizer=tokenizer,
        path_to_cache=f"{prefix}-{samples}",
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    sizes = [samples, 0, 0]
    data = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()[0]
    return [data[i]["tokens"].tolist() for i in range(10)]


orders = {samples: order(samples) for samples in (10, 20, 24, 25, 40)}
for samples, first in orders.items():
    print(samples, first[:3])
assert orders[10] == orders[20] == orders[24] and orders[25] == orders[40]
same = sum(old == new for old, new in zip(orders[24], orders[25], strict=True))
print(same, "of the first 10 samples are the same")
assert same <= 1
PY
"$T/venv/bin/python" -W ignore "$T/probe.py" "$T"
