"""Logs, dumps, traces, checkpoints, corpora and tokenizers that are damaged or meant to harm: a result or one line."""

import contextlib
import json
import os
import pickle
import re
import signal
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from dumps import recording, topology

from trilane.cli.app import main
from trilane.utils.tables import Text, one_line, printable, short

LIMIT_S = 60  # a hang, not a measurement
Content = bytes | str | Callable[[Path], object]


@contextlib.contextmanager
def no_hang() -> Iterator[None]:
    """Fails where the block takes longer than LIMIT_S."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"no result within {LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def write(path: Path, content: Content) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if callable(content):
        content(path)
    else:
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def judged(argv: list[str], root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code and output of a command, which must be harmless: one line where it fails, no file, no control codes."""
    before = sorted(root.rglob("*"))
    with no_hang():
        code = main(argv)
    said = capsys.readouterr()
    assert code in (0, 1, 2) and (code != 2 or said.err.count("\n") == 1), said.err[-2000:]
    assert len(said.err) < 4000, "a value is shortened in a message"
    assert all(c.isprintable() or c in "\n\t" for c in said.out + said.err)
    assert sorted(root.rglob("*")) == before, "nothing is written"
    return code, said.out + said.err


# What moves the cursor, rewrites the window's title or reorders a line (Trojan Source, CVE-2021-42574).
CONTROLS = {
    "colour": ("\x1b[31mred\x1b[0m", "red"),
    "title": ("a\x1b]0;rm -rf ~\x07b", "ab"),
    "title without an end": ("a\x1b]0;gone", "a"),
    "device control": ("a\x1bP1$r\x1b\\b", "ab"),
    "clear screen": ("a\x1b[2J\x1b[Hb", "ab"),
    "8-bit escapes": ("a\x9b2Jb", "a 2Jb"),
    "backspaces": ("safe\b\b\b\bevil", "safe    evil"),
    "carriage return": ("evil\rsafe", "evil safe"),
    "right-to-left": ("a\u202eb\u2066c\u200f", "a b c "),
    "line separator": ("a\u2028b\x85c", "a b c"),
    "invisible": ("a\u200bb\ufeffc", "a b c"),
    "tags": ("a\U000e0041b", "a b"),
    "half a character": ("a\udc80b", "a b"),
    "NUL": ("a\0b", "a b"),
}


@pytest.mark.parametrize(("text", "shown"), CONTROLS.values(), ids=CONTROLS)
def test_text_of_a_file_controls_no_terminal(text: str, shown: str) -> None:
    """ECMA-48, 5.4 and 5.6; Unicode's bidirectional marks."""
    assert printable(text) == shown
    assert all(one(text).isprintable() for one in (one_line, short, Text.escape))


def test_plain_text_stays_as_it_is() -> None:
    text = "Übertragung\tvon 3 µs – 日本語 🙂\nzweite Zeile a\xa0b"
    assert printable(text) == text


def test_a_long_text_is_cut_at_a_word_or_inside_one() -> None:
    assert short("aa bb cc", 7) == "aa bb …"
    assert re.fullmatch("x{5} …", short("x" * 10**6, 7))


def calls(state: str = "started", last: int = 5) -> list[dict[str, Any]]:
    states = {**dict.fromkeys(range(1, last), "completed"), last: state}
    return [{"group": "dp", "sequence": n, "op": "all_reduce", "state": states[n]} for n in states]


def damaged(**changes: Any) -> bytes:
    """Rank 0's recording as JSON, with fields of its one group, its status and its entries replaced."""
    values = json.loads(recording(calls(), {"dp": [0, 1]}, as_json=True))
    for name, value in changes.items():
        if name in ("pg_config", "pg_status", "entries"):
            values[name] = value
        elif name == "ranks":
            values["pg_config"]["dp"][name] = value
        else:
            values["entries"][-1][name] = value
    return json.dumps(values).encode()


class Canary:
    """Runs code where it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, ("canary",)


def bomb(levels: int, kind: Callable[[Any, Any], Any]) -> Any:
    """A value that holds itself twice at each level: small in a file, 2^levels if it is walked through."""
    value: Any = kind(1, 1)
    for _ in range(levels):
        value = kind(value, value)
    return value


def keyed_by(value: Any) -> bytes:
    """A pickle of {"entries": [], value: 1}; Python would need 2^levels steps to make its key."""
    inner = pickle.dumps(value, 2)[2:-1]
    return b"\x80\x02}(X\x07\x00\x00\x00entries]" + inner + b"K\x01u."


DEEP = 100_000
PAIR = '{"pg_config": {}, "entries": '
# A Flight Recorder dump of rank 0: whether its evidence still counts (the whole of it, or a part), or none of it.
RECORDINGS: dict[str, tuple[bytes, bool]] = {
    "ranks without an end": (damaged(ranks="[0, 1"), True),
    "ranks nested 24 deep": (damaged(ranks="[" * 24), True),
    "ranks nested": (damaged(ranks=[[0], [1]]), True),
    "ranks that are code": (damaged(ranks="__import__('os').mkdir('canary')"), True),
    "ranks of 10,000 digits": (damaged(ranks=f"[{'9' * 10_000}]"), True),
    "a negative rank": (damaged(ranks=[-1, 0]), True),
    "ranks by name": (damaged(ranks={"0": 1}), True),
    "group with controls": (damaged(process_group=["\x1b]0;x\x07dp", "\u202edp"]), True),
    "group config is a list": (damaged(pg_config=[1]), False),
    "no entries": (damaged(entries=None), False),
    "entries are numbers": (damaged(entries=[1, 2]), False),
    "status of another kind": (damaged(pg_status={"0": 5}), False),
    "sequence infinite": (damaged(collective_seq_id=float("inf")), False),
    "sequence a text": (damaged(collective_seq_id="5"), False),
    "sequence of 100 digits": (damaged(collective_seq_id=10**100), False),
    "op a list": (damaged(profiling_name=["nccl:all_reduce"]), False),
    "sizes nested": (damaged(input_sizes=[[[[1]]]]), False),
    "JSON 100,000 deep": ((PAIR + "[" * DEEP + "]" * DEEP + "}").encode(), False),
    "a number of 10,000 digits": ((PAIR + "[" + "9" * 10_000 + "]}").encode(), False),
    "JSON cut short": (damaged()[:-100], False),
    "UTF-16": (damaged().decode().encode("utf-16"), False),
    "a pickle that makes a folder": (pickle.dumps({"entries": Canary()}), False),
    "the same in protocol 0": (b"\x80\x00" + pickle.dumps({"entries": Canary()}, 0), False),
    "pickle 100,000 deep": (b"\x80\x02}X\x07\x00\x00\x00entries" + b"(" * DEEP + b"]" + b"t" * DEEP + b"s.", False),
    "pickle of shared lists": (pickle.dumps({"entries": bomb(60, lambda a, b: [a, b])}), False),
    "pickle with shared sizes": (
        pickle.dumps({"entries": [{"process_group": bomb(60, lambda a, b: [a, b])}]}),
        False,
    ),
    "pickle keyed by shared tuples": (keyed_by(bomb(60, lambda a, b: (a, b))), False),
    "pickle of 10^9 bytes": (b"\x80\x05\x8d" + struct.pack("<Q", 1 << 60) + b"x.", False),
    "pickle with a large index": (b"\x80\x02]r\xff\xff\xff\xff.", False),
    "pickle of itself": (b"\x80\x02]q\x00h\x00a.", False),
    "pickle of nothing": (b"\x80\x02.", False),
    "pickle of a set": (pickle.dumps({"entries": {1, 2}}), False),
    "pickle cut short": (recording(calls(), {"dp": [0, 1]})[:-40], False),
}


@pytest.mark.parametrize(("dump", "counts"), RECORDINGS.values(), ids=RECORDINGS)
def test_a_hostile_recording_costs_itself_or_its_damaged_field(
    dump: bytes, counts: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks 0 and 2 are in the sum that rank 1 never entered: rank 2's evidence counts whatever rank 0's file holds."""
    monkeypatch.chdir(tmp_path)
    groups = {"dp": [0, 1], "all": [0, 1, 2]}
    (tmp_path / "nccl_trace_rank_0").write_bytes(dump)
    waiting = [{**call, "group": "all"} for call in calls()]
    (tmp_path / "nccl_trace_rank_1").write_bytes(recording(calls("completed", 4) + waiting[:4], groups))
    (tmp_path / "nccl_trace_rank_2").write_bytes(recording(waiting, groups))
    topology(tmp_path, 1, 1, 3)
    code, said = judged(["debug", "hang", str(tmp_path)], tmp_path, capsys)
    assert code == 0 and "Rank 1 (" in said and "never entered all_reduce" in said
    assert ("its dump cannot be read" in said) is not counts
