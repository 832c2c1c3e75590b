"""Dialects as tables: the keys of a table, the error for a bad one, and one of the user's own."""

import json
import re

import pytest

from trilane.cli.app import main
from trilane.logs.dialects import tables
from trilane.logs.run import read_log, read_logs

# https://github.com/huggingface/nanotron/blob/main/src/nanotron/trainer.py
NANOTRON = "[default{r}]:09/24/2026 12:00:0{i} [INFO|DP=0|PP=0|TP={r}|n1]: iteration: {i} / 9 | consumed_tokens: {i}.05M | elapsed_time_per_iteration_ms: 1.67K | tokens_per_sec: 629K | tokens_per_sec_per_gpu: 78.6K | global_batch_size: 512 | lm_loss: {loss} | lr: 0.0003 | model_tflops_per_gpu: 119 | hardware_tflops_per_gpu: 121 | grad_norm: 1.26 | cuda_max_memory_reserved: 12.5G\n"
OWN = {
    "name": "ours",
    "iteration": ["update (?P<iteration>\\d+) of"],
    "fields": {"xent": "lm_loss", "took": "sec_per_it ms"},
}


@pytest.fixture(autouse=True)
def _no_own_tables(monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, "")


def own(folder, **keys):
    (folder / "own.json").write_text(json.dumps(OWN | keys))
    tables.use([folder / "own.json"])


def read(folder, text):
    (folder / "a.log").write_text(text)
    return read_log(folder / "a.log")


def test_numbers_with_thousands_and_units_are_seconds_bytes_and_flops(tmp_path):
    log = read(tmp_path, "".join(NANOTRON.format(i=i, r=r, loss=10.5 - i) for i in (1, 2) for r in (0, 1)))
    expected = {"iteration": 2, "train_iters": 9, "consumed_tokens": 2.05e6, "sec_per_it": 1.67, "lm_loss": 8.5}
    expected |= {"tokens_per_gpu_per_second": 78600, "flops_per_s_per_gpu": 121e12, "max_reserved": 12.5e9}
    assert (log.dialect, len(log.iterations)) == ("nanotron", 2), "a second rank's copy is no iteration"
    assert {name: log.iterations[name].iloc[-1] for name in expected} == pytest.approx(expected)
    assert list(log.memory["max_reserved"]) == [12.5e9] * 2


@pytest.mark.parametrize(
    "line", ["update 0 of 3: xent=2.5, took 1,250.5", "update 0 of 3 {'took': '1250.5', \"xent\": 2.5}"]
)
@pytest.mark.parametrize("prefix", ["", "[rank0]:", "0: ", "gpu-7: "])
def test_a_table_of_ones_own_reads_names_in_any_of_the_usual_forms(tmp_path, line, prefix):
    own(tmp_path, first_iteration=0)
    log = read(tmp_path, "noise\n" + "".join(prefix + line.replace("0 of", f"{i} of") + "\n" for i in (0, 1)))
    assert log.iterations[["iteration", "lm_loss", "sec_per_it"]].to_numpy().tolist() == [
        [0, 2.5, 1.2505],
        [1, 2.5, 1.2505],
    ]


def test_hours_minutes_and_seconds_of_many_lines_add_up(tmp_path):
    own(
        tmp_path,
        iteration=["update (?P<iteration>\\d+) after (?P<time_s__h>\\d+):(?P<time_s__min>\\d+):(?P<time_s__s>\\d+)"],
    )
    passed = [3500 + 30 * i for i in range(10, 40)]
    lines = [
        f"update {i} after {s // 3600}:{s % 3600 // 60:02d}:{s % 60:02d} xent 2.5\n" for i, s in enumerate(passed, 10)
    ]
    seconds = read(tmp_path, "".join(lines)).iterations["sec_per_it"]
    assert (len(seconds), set(seconds[1:])) == (30, {30.0})


def test_a_block_of_lines_is_one_iteration(tmp_path):
    own(tmp_path, lines="block")
    block = "update {i} of 3\n\t other: 5\n\t xent: 2.{i}\n\t took: 500\ndone with it\n"
    log = read(tmp_path, "".join(block.format(i=i) for i in (1, 2)))
    assert log.iterations[["lm_loss", "sec_per_it"]].to_numpy().tolist() == [[2.1, 0.5], [2.2, 0.5]]


def test_json_that_was_cut_is_no_iteration(tmp_path):
    own(tmp_path, lines="json", iteration=['"update": (?P<iteration>\\d+)'])
    line = '{"update": 1, "data": {"xent": 2.5, "took": "500"}}\n'
    log = read(tmp_path, line + line.replace("1,", "2,")[:-6])
    assert log.iterations[["iteration", "lm_loss", "sec_per_it"]].to_numpy().tolist() == [[1, 2.5, 0.5]]


def test_a_table_names_launches_evaluations_and_the_end(tmp_path):
    own(tmp_path, launch=["our run begins"], validation=["held out (?P<lm_loss>[\\d.]+)"], end=["we are done"])
    (tmp_path / "a.log").write_text(2 * "our run begins\nupdate 7 of 9 took 5\nheld out 2.25\nwe are done\n")
    for log in (runs := read_logs(tmp_path / "a.log")):
        assert (log.status, log.validation.to_numpy().tolist()) == ("completed", [[7, 2.25]])
    assert len(runs) == 2


BAD = [
    ({"name": "a b"}, "name=a b: must be a word"),
    ({"iteration": []}, "iteration=: must have a pattern"),
    ({"iteration": "update"}, "iteration=update: must be a list"),
    ({"iteration": ["update (?P<iteration>"]}, "is no regular expression"),
    ({"iteration": ["update \\d+"]}, "must have a group (?P<iteration>...)"),
    ({"iteration": ["update (?P<iteration>\\d+) (?P<loss>\\d)"]}, "column=loss: is none of"),
    ({"fields": {"took": "sec_per_it minutes"}}, "unit=minutes: is none of"),
    ({"fields": ["took"]}, "must be a JSON object"),
    ({"validation": ["held out \\d+"]}, "must have a group (?P<lm_loss>...)"),
    ({"lines": "xml"}, "lines=xml: must be json, block or bar"),
    ({"first_iteration": 2}, "first_iteration=2: must be 0 or 1"),
    ({"patterns": []}, "patterns"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_table_is_one_line_with_its_file(tmp_path, capsys, change, message):
    (tmp_path / "own.json").write_text(json.dumps(OWN | change))
    assert main(["logs", "parse", str(tmp_path / "own.json"), "--dialect", str(tmp_path / "own.json")]) == 2
    error = capsys.readouterr().err
    assert re.match(r"trilane: dialects=\S+own\.json: ", error) and message in error and error.count("\n") == 1
