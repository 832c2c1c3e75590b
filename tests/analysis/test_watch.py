"""`logs parse --watch`: what it reports of logs that grow, and when it ends."""

import contextlib
import gzip
import json

import pytest
from test_log_dialects import m2021

from trilane.analysis.watch import watch
from trilane.cli.app import main

OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB.\n"
LAUNCH = "------------------------ arguments ------------------------\n"


def lines(first, last, **numbers):
    return "".join(m2021(i, **{"n": 100, **numbers}) for i in range(first, last + 1))


def watched(steps, *paths, every=10.0):
    """The events of logs; before each further look one of `steps` happens, then nothing for 20 looks."""
    now, waiting = [1e9], list(steps)

    def sleep(seconds):
        now[0] += seconds
        if waiting:
            waiting.pop(0)()
        elif now[0] > 1e9 + 40 * every:
            raise KeyboardInterrupt

    found = []
    with contextlib.suppress(KeyboardInterrupt):
        for event in watch(paths, every, lambda: now[0], sleep):
            found.append(event)
    return found


def appends(path, *texts):
    def add(text):
        with path.open("a") as file:
            file.write(text)

    return [lambda text=text: add(text) for text in texts]


def test_each_interval_is_a_line_with_its_own_speed_and_the_end_is_the_record_of_parse(tmp_path, capsys):
    path = tmp_path / "a.log"
    texts = [lines(1, 10), m2021(11, n=100, ms=4000.0, loss=4.5)[:90], m2021(11, n=100, ms=4000.0, loss=4.5)[90:], OOM]
    found = watched(appends(path, *texts), path)
    assert [e.kind for e in found] == ["waiting", "iterations", "iterations", "status", "end"]
    first, second = (e.values for e in found[1:3])
    assert (first["first_iteration"], first["last_iteration"], first["sec_per_it"]) == (1, 10, 2.0)
    assert (second["last_iteration"], second["sec_per_it"], second["loss"]) == (11, 4.0, 4.5)
    assert second["seconds_left"] == 89 * 4.0 and "OOM" in found[3].text
    assert main(["logs", "parse", str(path), "--json"]) == 0
    assert found[-1].values["record"] == json.loads(capsys.readouterr().out)["runs"][0]


def test_a_message_after_which_the_run_goes_on_is_no_end(tmp_path):
    path = tmp_path / "a.log"
    steps = appends(path, lines(1, 3), "ConnectionError: retried\n", lines(4, 9))
    assert [e.kind for e in watched(steps, path)][1:5] == ["iterations", "status", "iterations", "status"]
    assert not any(e.kind == "end" for e in watched([], path))


def test_a_run_that_begins_in_the_same_file_ends_the_one_before(tmp_path):
    path = tmp_path / "a.log"
    steps = appends(path, lines(1, 3) + OOM, LAUNCH + lines(1, 5))
    kinds = [(e.kind, e.values.get("run")) for e in watched(steps, path)][1:]
    assert kinds[:5] == [("iterations", 1), ("status", None), ("end", 1), ("run", 2), ("iterations", 2)]


def test_a_truncated_or_rotated_log_is_followed_and_silence_is_reported_less_and_less(tmp_path):
    path = tmp_path / "a.log"
    path.write_text(lines(1, 5))

    def rotate():
        path.rename(tmp_path / "a.log.1")
        path.write_text(lines(6, 9))

    found = watched([rotate], path)
    assert [e.values["last_iteration"] for e in found if e.kind == "iterations"] == [5, 9]
    assert [e.kind for e in found].count("replaced") == 1 and not any(e.kind == "run" for e in found)
    silent = [e.values["seconds"] for e in found if e.kind == "silent"]
    assert silent[0] >= 60 and len(silent) == 2, "a line, and one more at four times that"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(b"x\n" * 99), "is a gzip file, which cannot grow"),
        (bytes(range(256)) * 99, "is a binary file, not a log"),
        ("line\n".encode("utf-16") * 99, "is UTF-16"),
        (None, "is not a file"),
    ],
    ids=["gzip", "binary", "UTF-16", "folder"],
)
def test_what_is_no_growing_log_is_refused_in_a_line_and_the_others_are_followed(tmp_path, capsys, content, message):
    bad, good = tmp_path / "bad.log", tmp_path / "good.log"
    bad.mkdir() if content is None else bad.write_bytes(content)
    good.write_text(lines(1, 3, loss=float("nan")) + f"ValueError: \x1b[31m{OOM}")
    assert main(["logs", "parse", "--watch", "--every", "0.01", str(bad), str(good)]) == 1
    output = capsys.readouterr()
    assert output.err.count("\n") == 1 and message in output.err and output.err.startswith("trilane: log=")
    assert "iterations 1 to 3 of 100" in output.out and "\x1b" not in output.out
    assert main(["logs", "parse", "--watch", "--every", "0.01", "--json", str(bad)]) == 2
    assert json.loads(capsys.readouterr().out)["event"] == "error"


def test_watch_writes_no_csv(tmp_path, capsys):
    assert main(["logs", "parse", "--watch", "a.log", "--csv", str(tmp_path / "all.csv")]) == 2
    assert "cannot be written with --watch" in capsys.readouterr().err


def test_a_number_that_cannot_be_right_is_reported_once_with_its_line(tmp_path):
    path = tmp_path / "a.log"
    wrong = lines(6, 6).replace("learning rate: 1.000E-04", "learning rate: 7.000E+00")
    found = [
        e.values
        for e in watched(appends(path, lines(1, 5), wrong + lines(7, 7), lines(8, 9)), path)
        if e.kind == "problem"
    ]
    assert [(p["column"], p["line"]) for p in found] == [("learning_rate", 6)]
