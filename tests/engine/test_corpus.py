"""Text becomes Megatron's indexed dataset once, and bad text is refused in one line."""

import json
from dataclasses import replace

import numpy as np
import pytest
from plans import SHAPE

from trilane.config.training import Data
from trilane_engine.data.corpus import check_pair, prepare

pytestmark = pytest.mark.filterwarnings("ignore")  # what megatron-core says while it is imported

TEXT = "a line of text\n" * 40


def test_bytes_and_end_of_document_come_back_from_megatrons_own_reader(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    source = tmp_path / "two.jsonl"
    texts = ["größe " * 20, TEXT]
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prefix = prepare(Data(source=str(source), folder=f"{tmp_path}/data"), SHAPE)
    assert [ids.tolist() for ids in IndexedDataset(prefix)] == [
        [*text.encode(), 256] for text in texts
    ]


def test_a_pair_made_for_megatron_is_used_as_it_is(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from torch import arange

    builder = IndexedDatasetBuilder(f"{tmp_path}/given.bin", dtype=np.int32)
    builder.add_document(
        arange(300), [100, 200]
    )  # one document of two sequences, as a sentence splitter leaves it
    builder.finalize(f"{tmp_path}/given.idx")
    prefix = f"{tmp_path}/given"
    lengths, largest = check_pair(prefix)
    assert (lengths.sum(), largest) == (300, 299)
    elsewhere = f"{tmp_path}/nowhere"  # the tokenizer that made it is not needed
    for source in (prefix, prefix + ".bin", prefix + ".idx"):
        assert (
            prepare(Data(source=source, tokenizer=elsewhere, folder=f"{tmp_path}/data"), SHAPE)
            == prefix
        )
    assert not (tmp_path / "data").exists()


def test_a_text_that_is_too_short_and_a_tokenizer_that_is_missing_or_too_large_are_refused(
    tmp_path,
):
    (tmp_path / "short.txt").write_text("too short")
    short = Data(source=f"{tmp_path}/short.txt", folder=f"{tmp_path}/data")
    with pytest.raises(ValueError, match=r"^data.source=.*: has 10 tokens, one sample needs 65$"):
        prepare(short, SHAPE)
    elsewhere = Data(source="mock", tokenizer=f"{tmp_path}/nowhere", folder=str(tmp_path))
    with pytest.raises(ValueError, match=r"^data.tokenizer=.*: no folder with a tokenizer.json"):
        prepare(elsewhere, SHAPE)
    with pytest.raises(ValueError, match="vocab_size=256: tokenizer bytes has 257 ids"):
        prepare(Data(source="mock", folder=str(tmp_path)), replace(SHAPE, vocab_size=256))
