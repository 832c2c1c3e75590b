"""Logs, dumps, traces, checkpoints, corpora and tokenizers that are damaged or meant to harm: a
result or one line.
"""

import gzip
import json
import os
import pickle
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dumps import faulthandler_text, pyspy_text, recording, topology
from plans import small_plan

from trilane.cli.app import main
from trilane.config.training import Data
from trilane.utils.tables import Text, one_line, printable, short
from trilane.workspace import checkpoints
from trilane_engine.data import corpus
from trilane_engine.data.corpus import tokenizer

Content = bytes | str | Callable[[Path], object]


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(240)
    yield
    signal.alarm(0)


def write(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def judged(
    argv: list[str],
    root: Path,
    capsys,
    command: Callable[[list[str]], int] = main,
) -> tuple[int, str]:
    """Exit code and output of a command, which must be harmless: one line where it fails, no file,
    no control codes.
    """
    before = sorted(root.rglob("*"))
    code = command(argv)
    output = capsys.readouterr()
    assert code in (0, 1, 2) and (code != 2 or output.err.count("\n") == 1), output.err[-2000:]
    assert len(output.err) < 4000, "a value is shortened in a message"
    assert all(c.isprintable() or c in "\n\t" for c in output.out + output.err)
    assert sorted(root.rglob("*")) == before, "nothing is written"
    return code, output.out + output.err


# What moves the cursor, rewrites the window's title or reorders a line (Trojan Source,
# CVE-2021-42574).
CONTROLS = {
    "title": ("a\x1b]0;rm -rf ~\x07b", "ab"),
    "device control": ("a\x1bP1$r\x1b\\b", "ab"),
    "right-to-left": ("a\u202eb\u2066c\u200f", "a b c "),
    "invisible": ("a\u200bb\ufeffc", "a b c"),
    "NUL": ("a\0b", "a b"),
}


@pytest.mark.parametrize(("text", "shown"), CONTROLS.values(), ids=CONTROLS)
def test_text_of_a_file_controls_no_terminal(text: str, shown: str):
    """ECMA-48, 5.4 and 5.6; Unicode's bidirectional marks."""
    assert printable(text) == shown
    assert all(one(text).isprintable() for one in (one_line, short, Text.escape))


def calls(state: str = "started", last: int = 5) -> list[dict[str, Any]]:
    states = {**dict.fromkeys(range(1, last), "completed"), last: state}
    return [{"group": "dp", "sequence": n, "op": "all_reduce", "state": states[n]} for n in states]


def damaged(**changes: Any) -> bytes:
    """Rank 0's recording as JSON, with fields of its one group and its last entry replaced."""
    values = json.loads(recording(calls(), {"dp": [0, 1]}, as_json=True))
    for name, value in changes.items():
        if name == "ranks":
            values["pg_config"]["dp"][name] = value
        else:
            values["entries"][-1][name] = value
    return json.dumps(values).encode()


def bomb(levels: int) -> Any:
    """A list that holds itself twice at each level: small in a file, 2^levels if it is walked
    through.
    """
    value: Any = 1
    for _ in range(levels):
        value = [value, value]
    return value


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch canary",)


# Flight Recorder dumps of rank 0 whose evidence does not count.
RECORDINGS: dict[str, bytes] = {
    "ranks that are code": damaged(ranks="__import__('os').mkdir('canary')"),
    "sequence infinite": damaged(collective_seq_id=float("inf")),
    "pickle with shared sizes": pickle.dumps({"entries": [{"process_group": bomb(60)}]}),
    "a pickle that runs code": pickle.dumps({"entries": Evil()}),
    "memory by the index of a memo": b"\x80\x02}r\xff\xff\xff\x7f.",
    "a key that is hashed for ever": b"\x80\x02}" + b")" + b"q\x00h\x00\x86" * 60 + b"Ns.",
    "deep lists": b"\x80\x02" + b"](" * 100_000,
    "pickle cut short": recording(calls(), {"dp": [0, 1]})[:-40],
}


@pytest.mark.parametrize("dump", RECORDINGS.values(), ids=RECORDINGS)
def test_a_hostile_recording_costs_itself(
    dump: bytes,
    tmp_path,
    capsys,
    monkeypatch,
):
    """Ranks 0 and 2 are in the sum that rank 1 never entered: rank 2's evidence counts whatever
    rank 0's file holds.
    """
    monkeypatch.chdir(tmp_path)
    groups = {"dp": [0, 1], "all": [0, 1, 2]}
    (tmp_path / "nccl_trace_rank_0").write_bytes(dump)
    waiting = [{**call, "group": "all"} for call in calls()]
    (tmp_path / "nccl_trace_rank_1").write_bytes(
        recording(calls("completed", 4) + waiting[:4], groups)
    )
    (tmp_path / "nccl_trace_rank_2").write_bytes(recording(waiting, groups))
    topology(tmp_path, 1, 1, 3)
    code, output = judged(["debug", "hang", str(tmp_path)], tmp_path, capsys)
    assert (
        code == 0 and output.startswith("rank 1 (") and "others wait for it in all_reduce" in output
    )
    assert "its dump cannot be read" in output


ERROR = "Traceback (most recent call last):\nRuntimeError: {}\n"
SUM = (
    ("all_reduce", "torch/distributed/distributed_c10d.py", 2811),
    ("step", "train.py", 40),
    ("<module>", "train.py", 9),
)
READ = (("read", "corpus.py", 12), ("step", "train.py", 38), ("<module>", "train.py", 9))


# What lies next to three ranks' stacks, by its name: it may be left out, or be a rank outside the
# grid.
NEXT_TO: dict[str, tuple[str, Content]] = {
    "a pipe": ("rank_3.txt", os.mkfifo),
    "a sparse file of 4 TiB": (
        "rank_3.txt",
        lambda path: (path.touch(), os.truncate(path, 1 << 42)),
    ),
    "a host with controls": (
        "trace-\x1b]0;x\x07\x1b[2J\u202e<img src=x>.out",
        faulthandler_text(SUM),
    ),
    "a line of 10^6 characters": ("rank_3.txt", pyspy_text((("x" * 10**6, "y" * 10**6, 1),))),
}


@pytest.mark.parametrize(("name", "content"), NEXT_TO.values(), ids=NEXT_TO)
def test_a_hostile_dump_costs_no_other_rank(name: str, content: Content, tmp_path, capsys):
    for rank, stack in enumerate((SUM, READ, SUM)):
        (tmp_path / f"rank_{rank}.txt").write_text(pyspy_text(stack))
    topology(tmp_path, 1, 1, 3)
    write(tmp_path / name, content)
    code, output = judged(["debug", "hang", str(tmp_path)], tmp_path, capsys)
    assert code == 0 and re.search(r"[Rr]anks? 1\b", output) and len(output) < 10_000, output[:2000]


STEP = " iteration {}/ 9 | elapsed time per iteration (ms): 100.0 | lm loss: {} | number of nan iterations: 0 |\n"
LONG = 60_000  # characters: lines up to 65,536 are read in full
# Lines of a log between two iterations; each is repeated, or holds what a reader may convert or
# print.
LINES: dict[str, str] = {
    "an exception's name repeated": ERROR.format("x").replace(
        "RuntimeError:", "Error" * (LONG // 5)
    ),
    "progress bars": "1/9 [00:01<" + "x" * 1000 + "\r" + "{'loss': 1.5}\r" * 3000,
    "escapes": "\x1b[" * (LONG // 2),
    "controls in the evidence": ERROR.format(
        "\x1b]0;own\x07\x1b[2J\rsafe\b\b\u202e\u2066\ufeffend"
    ),
    "an iteration of 5,000 digits": STEP.format("9" * 5000, "1"),
    "infinite and not a number": STEP.format(3, "1e400").replace("100.0", "nan"),
    "wide characters": STEP.format(3, "１.５"),
}


@pytest.mark.parametrize("line", LINES.values(), ids=LINES)
def test_a_hostile_line_of_a_log_costs_no_other_line(line: str, tmp_path, capsys):
    path = tmp_path / "run.log"
    text = (
        STEP.format(1, "2.5")
        + STEP.format(2, "2.4")
        + line
        + "\n"
        + STEP.format(8, "2.1")
        + STEP.format(9, "2.0")
    )
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    code, output = judged(["logs", "parse", str(path)], tmp_path, capsys)
    assert code == 0 and "loss 2\n" in output


# Whole files: the exit code of `logs parse`.
FILES: dict[str, tuple[Content, int]] = {
    "UTF-16": (STEP.format(1, "2.5").encode("utf-16"), 0),
    "30,000 gzip files in one": (
        gzip.compress(STEP.format(1, "2.5").encode()) + gzip.compress(b"") * 30_000,
        0,
    ),
    "a gzip bomb": (gzip.compress(b"\0" * (64 << 20)), 2),
    "iterations that fall": ("".join(f" iteration {n}/ 9 |\n" for n in range(200, 0, -1)), 2),
}


@pytest.mark.parametrize(("content", "expected"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_log_is_one_line(
    content: Content,
    expected: int,
    tmp_path,
    capsys,
    monkeypatch,
):
    monkeypatch.setattr("trilane.logs.reading.lines.UNPACKED", 16 << 20)
    monkeypatch.setattr("trilane.logs.reading.runs.MAX_RUNS", 100)
    write(tmp_path / "run.log", content)
    code, _ = judged(["logs", "parse", f"{tmp_path}/run.log"], tmp_path, capsys)
    assert code == expected


def checkpoint(run: Path, **changes: Any) -> None:
    """A run with a checkpoint of one tensor, sealed as its writer would, with these changes of its
    content.
    """
    folder = run / "checkpoints/iter_0000010"
    folder.mkdir(parents=True)
    values = np.arange(24, dtype=np.float32)
    (folder / "rank_00000.safetensors").write_bytes(values.tobytes())
    piece = {
        "box": [[0, 2], [0, 4]],
        "file": "rank_00000.safetensors",
        "at": {"weight": 0, "exp_avg": 32, "exp_avg_sq": 64},
    }
    slices = [piece | changes.pop("piece", {})]
    content = {
        "identity": {"shape": {"hidden_size": 4}},
        "layout": ["megatron", 1, 1, 1, 1],
        "iteration": 10,
    }
    content |= {"consumed_samples": 80, "scalars": {"step": 10.0}}
    content |= {"files": {"rank_00000.safetensors": [values.nbytes, "0"]}}
    content |= {"tensors": {"w": {"shape": [2, 4], "slices": slices}}} | changes
    checkpoints.write_manifest(folder, content)


STATES: dict[str, Callable[[Path], None]] = {
    "a file outside": lambda run: checkpoint(run, piece={"file": "../../../secret"}),
    "an offset beyond the file": lambda run: checkpoint(
        run, piece={"at": {"weight": 10**15, "exp_avg": 0}}
    ),
    "a box outside its tensor": lambda run: checkpoint(run, piece={"box": [[0, 3], [0, 4]]}),
    "an identity of text": lambda run: checkpoint(run, identity="x"),
}


@pytest.mark.parametrize("make", STATES.values(), ids=STATES)
def test_a_hostile_checkpoint_is_one_line(make: Callable[[Path], None], tmp_path, capsys):
    run = tmp_path / "run"
    (tmp_path / "secret").write_bytes(bytes(96))
    make(run)
    code, output = judged(["debug", "restart", str(run), str(run)], tmp_path, capsys)
    assert code == 2, output


def pair(
    root: Path,
    *,
    ids: bytes = b"\0" * 600,
    code: int = 8,
    lengths: Sequence[int] = (100, 100, 100),
    sequences: int = 3,
) -> str:
    """A pair of three documents of 100 ids in 16 bits, with these changes of its data, index or
    header.
    """
    (root / "pair.bin").write_bytes(ids)
    index = corpus.HEADER.pack(corpus.MAGIC, 1, code, sequences, 4)
    for numbers, kind in ((lengths, np.int32), ((0, 200, 400), np.int64), (range(4), np.int64)):
        index += np.array(numbers, kind).tobytes()
    (root / "pair.idx").write_bytes(index)
    return f"{root}/pair"


def of(name: str, content: Content) -> Callable[[Path], str]:
    """What writes a source of that name, and returns its path."""

    def make(root: Path) -> str:
        write(root / name, content)
        return str(root / name)

    return make


def sparse(path: Path) -> None:
    """A file of 2^42 bytes that takes none on the disk."""
    path.touch()
    os.truncate(path, 1 << 42)


ROW = '{"text": "a good line"}\n' * 20
NO_ROW = '.jsonl:21: each line must be {"text": "..."} in UTF-8'
# Sources of a plan's data, and what their refusal ends with.
SOURCES: dict[str, tuple[Callable[[Path], str], str]] = {
    "missing": (lambda at: f"{at}/nowhere.txt", "(known names: stdlib, mock)"),
    "empty": (of("empty.txt", b""), "is empty"),
    "not UTF-8": (of("latin.txt", ROW.encode() + b"gr\xf6\xdfe"), "not text in UTF-8 (byte 482)"),
    "a .bin cut short": (
        lambda at: pair(at, ids=b"\0" * 595),
        "595 bytes, its index requires 600",
    ),
    "ids beyond the vocabulary": (
        lambda at: pair(at, ids=b"\0\2" * 300),
        "the vocabulary ends before vocab_size=512",
    ),
    "a negative length": (
        lambda at: pair(at, lengths=[100, -100, 100]),
        "sequences that do not follow one another in its .bin",
    ),
    "2^63 sequences": (
        lambda at: pair(at, sequences=2**63),
        "its header requires 110680464442257309762",
    ),
    "an index of 20 bytes": (
        of("pair.idx", corpus.MAGIC + b"\1" * 11),
        "pair.bin: is missing from the .bin/.idx pair",
    ),
    "negative tokens": (
        lambda at: pair(at, ids=b"\xff" * 600, code=3),
        "holds the negative token -1",
    ),
    "a NUL": (of("x.jsonl", ROW + '{"text": "a\0"}'), NO_ROW),
    "JSONL that is a pipe": (of("x.jsonl", os.mkfifo), "no such file"),
    "a text of 4 TiB": (
        of("x.txt", sparse),
        "has 4398046511104 bytes; at most 68719476736 are read",
    ),
}


def prepared(root: Path, data: dict[str, str], capsys) -> tuple[int, str]:
    """Exit code and output of the preparation of that data, from which nothing is left in the
    plan's folder.
    """
    folder = root.parent / f"{root.name}-data"
    plan = replace(small_plan(folder), data=Data(folder=str(folder), **data))
    write(root / "plan.json", json.dumps(plan.to_json()))
    code, output = judged([f"{root}/plan.json"], root, capsys, corpus.main)
    assert code == 0 or not [*folder.glob("*.[bi]*"), *folder.glob(".*")]
    return code, output


@pytest.mark.parametrize(("make", "rule"), SOURCES.values(), ids=SOURCES)
def test_a_hostile_corpus_is_one_line(make: Callable[[Path], str], rule: str, tmp_path, capsys):
    code, output = prepared(tmp_path, {"source": make(tmp_path)}, capsys)
    assert (code, output.startswith("data.source=")) == (2, True)
    assert output.endswith(f"{rule}\n")


def test_the_same_corpora_without_damage_are_read(tmp_path, capsys):
    """A line separator of Unicode inside a text is no end of its row."""
    row = json.dumps({"text": "a\u2028b" * 10}, ensure_ascii=False)
    for source in (pair(tmp_path), of("x.jsonl", "\ufeff" + ROW + row)(tmp_path)):
        assert prepared(tmp_path, {"source": source}, capsys)[0] == 0


def words(**changes: Any) -> str:
    """A tokenizer.json of three words, with these changes of it or of its model."""
    names = ("normalizer", "pre_tokenizer", "truncation", "padding", "version")
    outer = {name: changes.pop(name) for name in names if name in changes}
    model = {"type": "WordLevel", "vocab": {"</s>": 0, "a": 1, "b": 2}, "unk_token": "a"} | changes
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model} | outer)


UNREAD = "tokenizer.json cannot be read ("
TOKENIZERS: dict[str, tuple[Content, str]] = {
    "a negative id": (words(vocab={"</s>": 0, "a": -1}), UNREAD),
    "a version with controls": (words(version="\x1b[2J\n\u202e" * 1000), UNREAD),
    "the library's panic": (
        words(normalizer={"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
        UNREAD,
    ),
    "no end": (words(vocab={"a": 0}), "has none of the end-of-document tokens"),
    "a word without an id": (words(unk_token="?"), "cannot encode a document ("),
}


@pytest.mark.parametrize(("content", "rule"), TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_hostile_tokenizer_is_one_line(content: Content, rule: str, tmp_path, capsys):
    write(tmp_path / "tokenizer.json", content)
    write(tmp_path / "text.txt", "a b " * 100)
    data = {"source": f"{tmp_path}/text.txt", "tokenizer": str(tmp_path)}
    code, output = prepared(tmp_path, data, capsys)
    assert (code, rule in output) == (2, True), output


def test_a_tokenizer_that_would_truncate_or_pad_keeps_the_whole_document(tmp_path):
    cut = {"direction": "Right", "max_length": 1, "strategy": "LongestFirst", "stride": 0}
    pad = {"strategy": {"Fixed": 50}, "direction": "Right", "pad_to_multiple_of": None}
    pad |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    (tmp_path / "tokenizer.json").write_text(
        words(pre_tokenizer={"type": "WhitespaceSplit"}, truncation=cut, padding=pad)
    )
    assert tokenizer(str(tmp_path)).encode("a b a").tolist() == [1, 2, 1, 0]
