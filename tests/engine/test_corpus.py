"""Text becomes Megatron's indexed dataset once, and bad text is refused in one line."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from plans import SHAPE, small_plan

from trilane.config.training import Data, Part
from trilane.engine.data import corpus
from trilane.engine.data.corpus import Tokenizer, check_pair, documents, prepare, prepare_all, tokenizer, write_pair
from trilane.launch.local import environment

pytestmark = pytest.mark.filterwarnings("ignore")  # what megatron-core says while it is imported

TEXT = "a line of text\n" * 40


def read(prefix: str) -> list[list[int]]:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    return [document.tolist() for document in IndexedDataset(prefix)]


def test_bytes_and_end_of_document_come_back_from_megatrons_own_reader(tmp_path: Path) -> None:
    source = tmp_path / "two.jsonl"
    texts = ["größe " * 20, TEXT]
    source.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    prefix = prepare(Data(source=str(source), folder=str(tmp_path / "data")), SHAPE)
    assert read(prefix) == [[*text.encode(), 256] for text in texts]


def test_a_pair_made_for_megatron_is_used_as_it_is(tmp_path: Path) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
    from torch import arange

    builder = IndexedDatasetBuilder(str(tmp_path / "given.bin"), dtype=np.int32)
    builder.add_document(arange(300), [100, 200])  # one document of two sequences, as a sentence splitter leaves it
    builder.finalize(str(tmp_path / "given.idx"))
    prefix = str(tmp_path / "given")
    assert check_pair(prefix, 1000) == (300, 299)
    for source in (prefix, prefix + ".bin", prefix + ".idx"):
        assert prepare(Data(source=source, folder=str(tmp_path / "data")), SHAPE) == prefix
    assert not (tmp_path / "data").exists()


def test_a_folder_is_read_in_the_order_of_its_names_without_hidden_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name, text in {"b.txt": "second", "a.txt": "first", "deep/c.md": "third", ".hidden": "no"}.items():
        (tmp_path / name).write_text(text)
    assert list(documents(str(tmp_path))) == ["first", "second", "third"]


def test_a_hugging_face_tokenizer_is_taken_from_a_folder(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"a": 0, "line": 1, "of": 2, "text": 3, "<|endoftext|>": 4}
    made = Tokenizer(models.WordLevel(words, unk_token="<|endoftext|>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    coder = tokenizer(str(tmp_path))
    assert coder.vocab_size == 5
    assert coder.encode("a line of text").tolist() == [0, 1, 2, 3, 4]


def test_the_standard_library_is_prepared_in_five_seconds_and_never_twice(tmp_path: Path) -> None:
    data = Data(source="stdlib", folder=str(tmp_path))
    begin = time.process_time()
    prefix = prepare(data, SHAPE)
    assert time.process_time() - begin < 5
    made = Path(prefix + ".idx").stat().st_mtime_ns
    tokens, _ = check_pair(prefix)
    assert 3_000_000 < tokens < 5_000_000
    assert prepare(data, SHAPE) == prefix
    assert Path(prefix + ".idx").stat().st_mtime_ns == made


def test_the_name_changes_with_the_text_and_with_the_tokenizer(tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    source.write_text(TEXT)
    data = Data(source=str(source), folder=str(tmp_path / "data"))
    first = prepare(data, SHAPE)
    source.write_text(TEXT + "more")
    assert prepare(data, SHAPE) != first
    other = Tokenizer(name="x", vocab_size=257, eod=256, digest="x")
    assert corpus._made(data, other) != corpus._made(data, tokenizer("bytes"))


def test_of_two_at_a_time_the_second_waits_and_finds_the_work_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = []

    def slowly(texts: list[str], coder: Tokenizer, prefix: Path) -> None:
        written.append(prefix)
        time.sleep(0.2)
        write(texts, coder, prefix)

    write = corpus._write
    monkeypatch.setattr(corpus, "_write", slowly)
    data = Data(source="mock", folder=str(tmp_path))
    with ThreadPoolExecutor() as pool:
        first, second = pool.map(lambda _: prepare(data, SHAPE), range(2))
    assert first == second
    assert written == [Path(first)]


def test_a_warm_preparation_imports_no_torch(tmp_path: Path) -> None:
    """The launcher prepares before each run; only the first one pays for the import."""
    prepare(Data(source="mock", folder=str(tmp_path)), SHAPE)
    code = (
        "import sys; from trilane.engine.data.corpus import prepare; from trilane.config.plan import Data;"
        "from plans import SHAPE; prepare(Data(source='mock', folder=sys.argv[1]), SHAPE);"
        "assert 'torch' not in sys.modules"
    )
    env = environment(1)
    env["PYTHONPATH"] += f":{Path(__file__).parent}:{Path(__file__).parents[1]}"  # plans, and support that it needs
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=env, check=True)


def missing(at: Path) -> str:
    return str(at / "nowhere.txt")


def empty(at: Path) -> str:
    (at / "empty.txt").touch()
    return str(at / "empty.txt")


def latin(at: Path) -> str:
    (at / "latin.txt").write_bytes(TEXT.encode() + "größe".encode("latin-1"))
    return str(at / "latin.txt")


BUILDER = """
import numpy as np, torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
from trilane.engine.data.corpus import write_pair
for vocabulary, largest in ((65499, 300), (65500, 300)):
    arrays = [np.arange(n, dtype=np.int32) for n in (largest, 0, 7)]
    builder = IndexedDatasetBuilder("theirs.bin", dtype=DType.optimal_dtype(vocabulary))
    for ids in arrays:
        builder.add_item(torch.from_numpy(ids))
        builder.end_document()
    builder.finalize("theirs.idx")
    write_pair(arrays, "ours", vocabulary)
    print([open(f"ours.{end}", "rb").read() == open(f"theirs.{end}", "rb").read() for end in ("bin", "idx")])
"""


@pytest.mark.slow
def test_a_pair_is_what_megatron_cores_builder_writes(ask: Callable, data: Path, tmp_path: Path) -> None:
    """To the last byte, in 16 and in 32 bits, an empty document included."""
    code = f"import os\nos.chdir({str(tmp_path)!r})\n{BUILDER}"
    assert ask(small_plan(data), code) == 2 * "[True, True]\n"


def short(at: Path) -> str:
    (at / "short.txt").write_text("too short")
    return str(at / "short.txt")


def no_text(at: Path) -> str:
    (at / "rows.jsonl").write_text('{"text": "good"}\n{"txet": "bad"}\n')
    return str(at / "rows.jsonl")


def pair(at: Path, largest: int = 300) -> Path:
    write_pair([np.arange(largest + 1, dtype=np.int32)], str(at / "pair"), 60_000)
    return at / "pair"


def truncated_index(at: Path) -> str:
    index = pair(at).with_suffix(".idx")
    index.write_bytes(index.read_bytes()[:-5])
    return str(at / "pair")


def no_index(at: Path) -> str:
    pair(at).with_suffix(".idx").write_bytes(b"something else entirely, of some length")
    return str(at / "pair")


def truncated_data(at: Path) -> str:
    data = pair(at).with_suffix(".bin")
    data.write_bytes(data.read_bytes()[:-5])
    return str(at / "pair")


def lost_data(at: Path) -> str:
    pair(at).with_suffix(".bin").unlink()
    return str(at / "pair")


def beyond(at: Path) -> str:
    return str(pair(at, largest=512))


BAD = [
    (missing, "no such file or folder (known names: stdlib, mock)"),
    (empty, "is empty"),
    (latin, "latin.txt: not text in UTF-8 (byte 602)"),
    (short, "short.txt: has 10 tokens, one sample needs 65"),
    (no_text, 'rows.jsonl:2: each line must be {"text": "..."}'),
    (truncated_index, "pair.idx: is truncated: 57 bytes, its header requires 62"),
    (no_index, "pair.idx: is not a Megatron index"),
    (truncated_data, "pair.bin: is truncated: 597 bytes, its index requires 602"),
    (lost_data, "pair.bin: is missing from the .bin/.idx pair"),
    (beyond, "pair: holds token 512, the vocabulary ends before vocab_size=512"),
]


@pytest.mark.parametrize(("make", "message"), BAD, ids=[make.__name__ for make, _ in BAD])
def test_a_bad_corpus_is_refused_in_one_line(make, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        prepare(Data(source=make(tmp_path), folder=str(tmp_path / "data")), SHAPE)
    assert str(error.value).startswith("data.source=")
    assert str(error.value).endswith(message)
    assert "\n" not in str(error.value)


def test_a_missing_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^data.tokenizer=.*nowhere: no folder with a tokenizer.json"):
        prepare(Data(source="mock", tokenizer=str(tmp_path / "nowhere"), folder=str(tmp_path)), SHAPE)


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    from dataclasses import replace

    with pytest.raises(ValueError, match="vocab_size=256: tokenizer bytes has 257 ids"):
        prepare(Data(source="mock", folder=str(tmp_path)), replace(SHAPE, vocab_size=256))


def test_a_blend_is_prepared_once_a_source_and_a_bad_source_is_refused(tmp_path: Path) -> None:
    parts = (Part(source="mock", weight=1), Part(source=short(tmp_path), weight=1))
    data = Data(source="blend", blend=parts, folder=str(tmp_path / "data"))
    with pytest.raises(ValueError, match=r"^data\.source=.*short\.txt: has 10 tokens, one sample needs 65$"):
        prepare_all(data, SHAPE)
    (tmp_path / "short.txt").write_text(TEXT)
    prefixes = prepare_all(data, SHAPE)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "data").glob("*.idx")}
    assert len(prefixes) == len(made) - 1 == 2  # the one that is too short was prepared too
    assert prepare_all(data, SHAPE) == prefixes
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "data").glob("*.idx")} == made
