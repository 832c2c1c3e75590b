"""Text becomes Megatron's indexed dataset once, and bad text is refused in one line."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plans import SHAPE

from trilane.config.training import Data
from trilane_engine.data.corpus import check_pair, prepare, write_pair

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


def pair(at: Path, largest: int = 300) -> Path:
    write_pair([np.arange(largest + 1, dtype=np.int32)], f"{at}/pair", 60_000)
    return at / "pair"


def of(name: str, content: bytes) -> Callable[[Path], str]:
    """A source of this content."""

    def made(at: Path) -> str:
        (at / name).write_bytes(content)
        return str(at / name)

    return made


def damaged(suffix: str, change: Callable[[bytes], bytes]) -> Callable[[Path], str]:
    """A pair one of whose files is changed."""

    def made(at: Path) -> str:
        file = pair(at).with_suffix(suffix)
        file.write_bytes(change(file.read_bytes()))
        return f"{at}/pair"

    return made


SHORT = "has 10 tokens, one sample needs 65"
BAD = {
    "missing": (lambda at: f"{at}/nowhere.txt", "(known names: stdlib, mock)"),
    "empty": (of("empty.txt", b""), "is empty"),
    "latin": (of("latin.txt", TEXT.encode() + b"gr\xf6\xdfe"), "not text in UTF-8 (byte 602)"),
    "short": (of("short.txt", b"too short"), SHORT),
    "truncated": (damaged(".bin", lambda b: b[:-5]), "597 bytes, its index requires 602"),
    "beyond": (lambda at: str(pair(at, 512)), "the vocabulary ends before vocab_size=512"),
}


@pytest.mark.parametrize(("make", "message"), BAD.values(), ids=BAD)
def test_a_bad_corpus_is_refused_in_one_line(make: Callable, message: str, tmp_path):
    with pytest.raises(ValueError) as error:
        prepare(Data(source=make(tmp_path), folder=f"{tmp_path}/data"), SHAPE)
    assert str(error.value).startswith("data.source=")
    assert str(error.value).endswith(message)
    assert "\n" not in str(error.value)


def test_a_tokenizer_that_is_missing_or_larger_than_the_vocabulary_is_refused(
    tmp_path,
):
    elsewhere = Data(source="mock", tokenizer=f"{tmp_path}/nowhere", folder=str(tmp_path))
    with pytest.raises(ValueError, match=r"^data.tokenizer=.*: no folder with a tokenizer.json"):
        prepare(elsewhere, SHAPE)
    with pytest.raises(ValueError, match="vocab_size=256: tokenizer bytes has 257 ids"):
        prepare(Data(source="mock", folder=str(tmp_path)), replace(SHAPE, vocab_size=256))
