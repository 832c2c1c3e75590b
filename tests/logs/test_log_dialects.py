"""Lines as each trainer prints them (samples.json, written by us after its code): the iterations
once, in our units; the user's own tables; and what is said of a log that nothing reads.
"""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from trilane.cli.app import main
from trilane.logs import dialects as tables
from trilane.logs.run import read_log
from trilane.utils.validation import DATA

M2021 = " iteration {i:8d}/{n:8d} | consumed samples: {c:12d} | elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.000E-04 | global batch size:     4 | lm loss: {loss:.6E} | loss scale: 1024.0 | grad norm: 1.250 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
M2022 = " iteration {i:8d}/      20 | consumed samples: {c:12d} | consumed tokens: {t:12d} | elapsed time per iteration (s): 700.00 | learning rate: 3.787E-06 | global batch size:  2048 | lm loss: 6.000000E+00 | grad norm: 2.763 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 2.926 | TFLOPs: 107.48 |\n"
TITAN = "\x1b[31mstep: {i:2d}  \x1b[32mloss:  {loss:.4f}  \x1b[38;2;180;60;0mgrad_norm:  1.5000  \x1b[36mmemory: 38.50GiB(40.53%)  \x1b[34mtps: 7,812  \x1b[33mtflops: 312.50  \x1b[35mmfu: 31.60%\x1b[39m\n"


def m2021(i, n=10, ms=2000.0, loss=5.0):
    return M2021.format(i=i, n=n, c=4 * i, ms=ms, loss=loss)


def m2022(i):
    return M2022.format(i=i, c=2048 * i, t=2048 * 2048 * i)


def read(folder, text):
    (folder / "a.log").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_log(folder / "a.log")


SAMPLES = json.loads((Path(__file__).parent / "samples.json").read_text())
TABLES = sorted(
    {path.stem for path in (DATA / "dialects").glob("*.json")}
    - {"megatron-2021", "deepspeed", "trilane"}
)


@pytest.fixture(autouse=True)
def _no_own_tables(monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, "")


@pytest.mark.parametrize("before", ["", "noise\n" * 40], ids=("alone", "after other lines"))
@pytest.mark.parametrize("name", SAMPLES)
def test_a_sample_is_its_iterations_in_seconds_flops_and_bytes(tmp_path, name, before):
    sample = SAMPLES[name]
    log = read(tmp_path, before + "\n".join(sample["text"]))
    assert (log.dialect, len(log.iterations)) == (sample["dialect"], sample["rows"])
    last = log.iterations.iloc[-1]
    assert {column: last.get(column, np.nan) for column in sample["last"]} == pytest.approx(
        sample["last"]
    )


@pytest.mark.parametrize("name", TABLES)
def test_a_table_names_its_source_and_reads_no_line_of_another_trainer(name):
    table = tables.read_dialect(DATA / "dialects" / f"{name}.json")
    lines = {
        line: s["dialect"]
        for s in SAMPLES.values()
        for text in s["text"]
        for line in text.split("\r")
    }
    found = {dialect for line, dialect in lines.items() if table.iterations(line.encode())}
    assert found <= {name} and table.source.startswith("https://github.com/")


LAST = {
    "nemo-2": "Training epoch 0, iteration 9/9 | lr: 0.0006 | reduced_train_loss: 7.5 | train_step_timing in s: 1.675\n",
    "olmo": "[step=100/100,epoch=0]\n    train/CrossEntropyLoss=3.5\n",
    "litgpt": "Epoch 1 | iter 8 step 8 | loss train: 1.8, val: n/a | iter time: 300.50 ms (step)\nTraining time: 583.36s\n",
}


@pytest.mark.parametrize("name", LAST)
def test_a_run_that_reached_its_last_iteration_is_completed(tmp_path, name):
    log = read(tmp_path, LAST[name] + "bye\n")
    assert (log.dialect, log.status) == (name, "completed")


def test_a_number_that_no_column_has_is_named_once(tmp_path):
    log = read(tmp_path, LAST["litgpt"].replace("8 step", "64 step"))
    assert log.notes == ("not read: iter time",)


def test_memory_timers_and_arguments_are_read(tmp_path):
    text = (
        "+ srun bash -c 'python pretrain_gpt.py --num-layers 40 --lr 1e-4 --fp16 --wandb-api-key abc --data-path \"a b\"'\n"
        "------------------------ arguments ------------------------\n"
        "  hidden_size ..................................... 6144\n  a_method_whose_name_is_without_dots  None\n"
        "-------------------- end of arguments ---------------------\n"
        " > padded vocab (size: 50257) with 431 dummy tokens (new size: 50688)\n"
        "[INFO] [config.py:752:print]   zero_optimization_stage ...... 3\n"
        "[INFO] [utils.py:1:see_memory_usage] MA 3.5 GB         Max_MA 9.25 GB         CA 6.0 GB         Max_CA 6 GB \n"
        f"{m2021(1)}time (ms) | forward-compute: 148.03 | backward-compute: 415.50 | batch-generator: 2.50\n{m2021(2)}"
        "(min, max) time across ranks (ms):\n    optimizer ......................................: (10.00, 20.00)\n"
    )
    log = read(tmp_path, text)
    expected = {
        "num_layers": 40,
        "lr": 1e-4,
        "hidden_size": 6144,
        "fp16": True,
        "padded_vocab_size": 50688,
    }
    expected |= {
        "deepspeed.zero_optimization_stage": 3,
        "wandb_api_key": "(hidden)",
        "a_method_whose_name_is_without_dots": None,
    }
    assert {name: log.arguments[name] for name in expected} == expected
    assert log.memory["max_allocated"] == 9.25 * 2**30
    assert log.timers["forward-compute"].tolist()[0] == 0.14803
    assert log.timers["optimizer"].iloc[1] == 0.02


# Tables of the user's own.
OWN = {
    "name": "ours",
    "iteration": ["update (?P<iteration>\\d+) of"],
    "fields": {"xent": "lm_loss", "took": "sec_per_it ms"},
}


def own(folder, **keys):
    (folder / "own.json").write_text(json.dumps(OWN | keys))
    tables.use([folder / "own.json"])


CLOCK = (
    "update (?P<iteration>\\d+) after (?P<time_s__h>\\d+):(?P<time_s__min>\\d+):(?P<time_s__s>\\d+)"
)
TWICE = "update 1 of 3: xent=2.5, took 1,250.5\nupdate 2 of 3 {{'took': '1250.5', \"xent\": 2.5}}\n"
JSON = '{"update": 1, "data": {"xent": 2.5, "took": "500"}}\n'
OWN_LINES = {  # keys of a table, lines, and the loss and the seconds of each iteration
    "names in any of the usual forms": (
        {},
        TWICE.replace("{{", "{").replace("}}", "}"),
        [[2.5, 1.2505]] * 2,
    ),
    "a block": (
        {"lines": "block"},
        "".join(
            f"update {i} of 3\n\t other: 5\n\t xent: 2.{i}\n\t took: 500\ndone with it\n"
            for i in (1, 2)
        ),
        [[2.1, 0.5], [2.2, 0.5]],
    ),
    "JSON, the last cut": (
        {"lines": "json", "iteration": ['"update": (?P<iteration>\\d+)']},
        JSON + JSON.replace("1,", "2,")[:-6],
        [[2.5, 0.5]],
    ),
    "hours, minutes and seconds": (
        {"iteration": [CLOCK]},
        "update 1 after 0:59:50 xent 2.5\nupdate 2 after 1:00:20 xent 2.5\n",
        [[2.5, None], [2.5, 30.0]],
    ),
    "digits that decide what a line is": (
        {"iteration": ["phase 1 update (?P<iteration>\\d+)"]},
        "".join(f"phase {i % 7} update {100 + i} xent 2.{i % 9} took 9\n" for i in range(1, 15)),
        [[2.1, 0.009], [2.8, 0.009]],
    ),
}


@pytest.mark.parametrize(("keys", "text", "expected"), OWN_LINES.values(), ids=OWN_LINES)
def test_a_table_of_ones_own_reads_its_lines(tmp_path, keys, text, expected):
    own(tmp_path, **keys)
    rows = read(tmp_path, text).iterations[["lm_loss", "sec_per_it"]].to_numpy().tolist()
    assert [[None if x != x else x for x in row] for row in rows] == expected


def test_a_table_names_evaluations_and_the_end(tmp_path):
    own(
        tmp_path,
        validation=["held out (?P<lm_loss>[\\d.]+)"],
        end=["we are done"],
    )
    log = read(tmp_path, "update 7 of 9 took 5\nheld out 2.25\nwe are done\n")
    assert (log.status, log.validation.to_numpy().tolist()) == ("completed", [[7, 2.25]])


BAD = [
    ({"iteration": []}, "iteration=: must have a pattern"),
    ({"iteration": ["update \\d+"]}, "must have a group (?P<iteration>...)"),
    ({"iteration": ["update (?P<iteration>\\d+) (?P<loss>\\d)"]}, "column=loss: is none of"),
    ({"fields": ["took"]}, "must be a JSON object"),
    ({"lines": "xml"}, "lines=xml: "),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_a_bad_table_is_one_line_with_its_file(tmp_path, capsys, change, message):
    (tmp_path / "own.json").write_text(json.dumps(OWN | change))
    assert main(f"logs parse {tmp_path}/own.json --dialect {tmp_path}/own.json".split()) == 2
    error = capsys.readouterr().err
    assert (
        re.match(r"trilane: dialects=\S+own\.json: ", error)
        and message in error
        and error.count("\n") == 1
    )
