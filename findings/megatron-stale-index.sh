#!/usr/bin/env bash
# megatron-core 0.16.1, torch 2.13.0, Linux x86_64, Python 3.10 to 3.13, no GPU; seen 2026-11-28 on
# Python 3.11, and the same with megatron-core 0.19.2 on Python 3.12.
#
# One would guess: when a corpus is tokenized again, to the same .bin and .idx, a new run reads the
# new corpus.
# What happens: the sample index is cached in a folder beside the data (or in --data-cache-path),
# under a hash of path, seed, lengths and split, not of content, size or time. The new corpus is
# read through the index of the old one, without a word: here its second half is never read, in no
# epoch.
#     20 documents, then 40 under the same name: 24 samples of documents 101 to 120; without
#     the cache 49 samples, 101 to 140
# Exit 1 where this changes.
set -euo pipefail
T=$(mktemp -d)
trap 'rm -rf "$T"' EXIT
"${PYTHON:-python3}" -m venv "$T/venv"
"$T/venv/bin/pip" install -q --no-compile torch==2.13.0 megatron-core==0.16.1

cat >"$T/write.py" <<'PY'
import sys

import numpy
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

prefix, first, last = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
builder = IndexedDatasetBuilder(prefix + ".bin", dtype=numpy.int32)
for document in range(first, last + 1):
    builder.add_document(torch.full((5,), document), [5])
builder.finalize(prefix + ".idx")
PY
cat >"$T/read.py" <<'PY'
import sys
from types import SimpleNamespace

from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

tokenizer = SimpleNamespace(unique_identifiers={"class": "none"}, eod=0, pad=0, vocab_size=128)
config = GPTDatasetConfig(
    random_seed=1,
    sequence_length=4,
    blend=([sys.argv[1]], None),
    split="1",
    tokenizer=tokenizer,
    reset_position_ids=False,
    reset_attention_mask=False,
    eod_mask_loss=False,
)
data = BlendedMegatronDatasetBuilder(GPTDataset, [10, 0, 0], lambda: True, config).build()[0]
tokens = {token for i in range(len(data)) for token in data[i]["tokens"].tolist()} - {0}
print(len(data), "samples, documents up to", max(tokens))
PY
python="$T/venv/bin/python"
"$python" -W ignore "$T/write.py" "$T/corpus" 1 20
"$python" -W ignore "$T/read.py" "$T/corpus"
"$python" -W ignore "$T/write.py" "$T/corpus" 101 140
stale=$("$python" -W ignore "$T/read.py" "$T/corpus")
rm -r "$T/corpus/cache"
fresh=$("$python" -W ignore "$T/read.py" "$T/corpus")
echo "with the cache: $stale; without: $fresh"
[ "$stale" = "24 samples, documents up to 120" ]
[ "$fresh" = "49 samples, documents up to 140" ]
