"""The command `logs parse`: what it prints, what it writes, and what it says about bad files."""

import csv
import gzip
import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from support import REPOSITORY, small_plan
from test_endings import BAD, HARD
from test_log_dialects import m2021, m2022
from test_measure import log as numbers

from trilane.analysis.collect import MeasuredRuns, measure_runs
from trilane.analysis.measure import measure_log
from trilane.cli.app import main
from trilane.config.model import ModelShape
from trilane.workspace.study import Study

DUMP = "------------------------ arguments ------------------------\n" + "".join(
    f"  {name} {'.' * (48 - len(name))} {value}\n"
    for name, value in (
        ("num_layers", 24),
        ("hidden_size", 2048),
        ("num_attention_heads", 16),
        ("seq_length", 2048),
        ("padded_vocab_size", 50304),
        ("checkpoint_activations", True),
        ("world_size", 8),
        ("global_batch_size", 4),
    )
)
MEMORY = "[Rank 3] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: 2048.0 | reserved: 3.0 | max reserved: 4096.0\n"


def log(folder, name="a.log", text=None):
    (folder / name).write_text(text or DUMP + "".join(map(m2021, range(1, 11))) + MEMORY)
    return str(folder / name)


def parsed(capsys, *arguments):
    code = main(["logs", "parse", *arguments, "--json"])
    output = capsys.readouterr()
    return code, json.loads(output.out)["runs"] if output.out else [], output.err


def test_a_run_is_one_record(tmp_path, capsys):
    code, (run,), _ = parsed(capsys, log(tmp_path))
    assert code == 0 and run["file"].endswith("a.log")
    numbers = {"dialect": "megatron-2021", "status": "completed", "iterations": 10, "sec_per_it": 2.0, "last_loss": 5.0}
    assert {name: run[name] for name in numbers} == numbers
    assert run["max_memory_gib"] == 2.0 and "iteration       10/" in run["evidence"]
    shape = ModelShape(num_layers=24, hidden_size=2048, num_attention_heads=16, seq_length=2048, vocab_size=50304)
    assert list(run["tflops"]) == ["narayanan", "size_factor", "replicated", "megatron_causal"]
    assert run["tflops"]["narayanan"] == pytest.approx(shape.flops_per_iteration(4, True) / 2 / 8 / 1e12)
    assert run["left_out"] == [{"reason": "warm-up", "iterations": "1-5"}] and run["mfu"] is None
    assert run["tokens_per_s"] == 4 * 2048 / 2
    assert run["arguments"]["hidden_size"] == 2048


def test_what_the_log_prints_is_kept_next_to_it(tmp_path, capsys):
    _, (run,), _ = parsed(capsys, log(tmp_path, text=m2022(1) + m2022(2)))
    assert run["tflops"] == {"printed": 107.48} and run["max_memory_gib"] is None


def test_the_plan_of_a_run_folder_supplies_what_its_log_lacks(tmp_path, capsys):
    (tmp_path / "plan.json").write_text(json.dumps(small_plan(dp=2).to_json()))
    log(tmp_path, "run.log", "".join(map(m2021, range(1, 11))))
    log(tmp_path, "other.log", "".join(map(m2021, range(1, 11))))
    _, (run, other), _ = parsed(capsys, f"{tmp_path}/run.log", f"{tmp_path}/other.log")
    assert run["tflops"]["narayanan"] > 0 and other["tflops"] == {}
    (tmp_path / "plan.json").write_text("{")
    assert parsed(capsys, f"{tmp_path}/run.log")[1][0]["tflops"] == {}, "a broken plan does not hide the log"


def test_a_loss_that_is_no_number_is_null(tmp_path, capsys):
    _, (run,), _ = parsed(capsys, log(tmp_path, text=m2021(1, loss=float("nan"))))
    assert (run["last_loss"], run["status"]) == (None, "NaN loss")


def test_a_log_without_times_has_losses(tmp_path, capsys):
    (tmp_path / "a.log").write_text("{'loss': 2.5, 'epoch': 0.1}\n{'loss': 2.25, 'epoch': 0.2}\n")
    assert main(["logs", "parse", str(tmp_path / "a.log"), "--json"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert (run["iterations"], run["sec_per_it"], run["last_loss"]) == (2, None, 2.25)


EVALUATED = [  # Megatron-LM and BigScience's fork; a rank's prefix; the first Megatron; gpt-neox of 2024; the test set
    " validation loss at iteration 4 | lm loss value: 5.700000E+00 | lm loss PPL: 2.988674E+02 | ",
    "[default7]: validation loss at iteration 4 | lm loss value: 5.700000E+00 | lm loss PPL: 2.988674E+02 | ",
    " validation loss at iteration 6 | LM loss: 5.650000E+00 | LM PPL: 2.842915E+02",
    " validation results at iteration 8 | lm_loss value: 5.600000E+00 | lm_loss_ppl value: 2.704264E+02 | ",
    " validation loss at iteration 10 on validation set | lm loss value: nan | lm loss PPL: nan | ",
    " validation loss at iteration 10 on test set | lm loss value: 5.400000E+00 | lm loss PPL: 2.214064E+02 | ",
]


def test_validation_losses_are_read_once_each_and_without_the_test_set(tmp_path, capsys):
    text = "".join(map(m2021, range(1, 11))) + "".join(f"{'-' * 99}\n{line}\n{'-' * 99}\n" for line in EVALUATED)
    _, (run,), _ = parsed(capsys, log(tmp_path, text=text))
    assert [(row["iteration"], row["lm_loss"]) for row in run["validation"]] == [
        (4, 5.7),
        (6, 5.65),
        (8, 5.6),
        (10, None),
    ]
    assert run["status"] == "completed" and run["iterations"] == 10


HUGE = "1e400"
ABSURD = [
    (m2021(8) + m2021(9)).replace("skipped iterations:   0", f"skipped iterations: {HUGE}"),
    (m2021(8) + m2021(9)).replace("nan iterations:   0", f"nan iterations: {HUGE}"),
    (m2021(8) + m2021(9)).replace("(ms): 2000.0", f"(ms): {HUGE}"),
    m2021(1) + m2021(2).replace("iteration        2/", f"iteration {'9' * 30}/") + m2021(3, k=1),
    m2021(1, ms=0.0),
    "[2022-10-31 10:59:02,323] [INFO] [logging.py:1:log_dist] [Rank 0] time (ms) | forward: 1.0\nRuntimeError: no\n",
    m2021(1) + "CUDA out of memory. Tried to allocate 1.451.451.45 GiB\n",
]


@pytest.mark.filterwarnings("error", "ignore::pytest.PytestUnraisableExceptionWarning")  # the garbage of other tests
@pytest.mark.parametrize("text", ABSURD)
def test_numbers_that_are_none_spoil_nothing(tmp_path, capsys, text):
    code, runs, errors = parsed(capsys, log(tmp_path, text=text))
    assert (code, len(runs) > 0, errors) == (0, True, "")


def test_a_reader_who_has_seen_enough_gets_no_traceback(tmp_path):
    (tmp_path / "a.log").write_text("{'loss': 2.5, 'epoch': 0.1}\n{'train_runtime': 9.0, 'epoch': 0.1}\n" * 400)
    command = f"{sys.executable} -m trilane logs parse {tmp_path}/a.log --json"
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY / "lib")}
    done = subprocess.run(["bash", "-c", f"{command} | head -1"], env=env, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("{\n", "")


def test_two_runs_of_a_file_are_two_records_and_all_iterations_one_table(tmp_path, capsys):
    (tmp_path / "b.log.gz").write_bytes(gzip.compress((m2021(1) + m2021(2)).encode()))
    twice = log(tmp_path, text=m2021(1) + m2021(2) + m2021(1, loss=4))
    code, runs, _ = parsed(capsys, twice, str(tmp_path / "b.log.gz"), "--csv", str(tmp_path / "all.csv"))
    assert (code, [r["iterations"] for r in runs]) == (0, [2, 1, 2])
    rows = list(csv.DictReader((tmp_path / "all.csv").open()))
    assert [(r["run"], r["iteration"]) for r in rows] == [("1", "1"), ("1", "2"), ("2", "1"), ("1", "1"), ("1", "2")]


def test_a_bad_file_among_good_ones_is_named_and_the_others_are_read(tmp_path, capsys):
    code, runs, errors = parsed(capsys, str(tmp_path / "none.log"), log(tmp_path))
    assert (code, len(runs)) == (1, 1)
    assert errors == f"trilane: log={tmp_path}/none.log: no such file\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.log"], "log=none.log: no such file"),
        ([], "logs=missing: is required"),
        (["a.log", "--csv", "no/such/folder.csv"], "csv=no/such/folder.csv: its folder does not exist"),
        (["a.log", "--csv", "a.log"], "csv=a.log: is a log"),
    ],
)
def test_bad_input_is_one_line_and_code_2(tmp_path, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    log(tmp_path)
    try:
        code = main(["logs", "parse", *arguments])
    except SystemExit as stop:
        code = stop.code
    assert (code, capsys.readouterr().err) == (2, f"trilane: {message}\n")


def test_people_read_three_lines(tmp_path, capsys):
    assert main(["logs", "parse", log(tmp_path)]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert first.endswith("a.log: completed (megatron-2021)") and "2 s/it" in second and "iteration" in third


@pytest.mark.parametrize(("kind", "content"), HARD, ids=[kind for kind, _ in HARD])
def test_the_command_reads_hard_files(tmp_path, capsys, kind, content):
    (tmp_path / "a.log").write_bytes(content)
    code, (run,), errors = parsed(capsys, str(tmp_path / "a.log"))
    assert (code, run["iterations"], run["sec_per_it"], errors) == (0, 10, 2.0, "")


@pytest.mark.parametrize(("name", "content", "message"), BAD, ids=[name for name, *_ in BAD])
def test_the_command_refuses_what_is_no_log_in_one_line(tmp_path, capsys, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, runs, errors = parsed(capsys, str(tmp_path / name))
    assert (code, runs) == (2, []) and errors.startswith(f"trilane: log={tmp_path}/{name}: {message}")
    _, *lines = errors.splitlines()
    assert not lines or (lines[0].endswith("look most like iterations:") and len(lines) <= 4)


def test_the_command_reads_a_document_of_tables(tmp_path, capsys):
    table = "| GPUs | TP | PP | DP | MBS | GBS | Sec/it | TFLOPs |\n|-|-|-|-|-|-|-|-|\n| 16 | 4 | 4 | 1 | 1 | 4 | 1.5 | 27.0 |\n"
    (tmp_path / "a.md").write_text(table)
    code, (run,), _ = parsed(capsys, str(tmp_path / "a.md"))
    assert (code, run["dialect"], run["sec_per_it"], run["tflops"]["printed"]) == (0, "table", 1.5, pytest.approx(27.0))
    assert "line 3: 16 | 4 | 4" in run["evidence"] and run["arguments"]["tp"] == 4


def test_a_loss_that_rose_is_not_called_calm_and_a_short_training_is_not_called_checked():
    for lines in (15, 30):
        text = MeasuredRuns(runs=(measure_log(numbers(lines, lm_loss=np.linspace(12.5, 40.8, lines))),)).spikes()
        assert "40.8" in text and ("12.5" in text or "divergence from" in text) and "no divergence" not in text.lower()
    short = MeasuredRuns(runs=(measure_log(numbers(12)),)).spikes()
    assert "no divergence" not in short and "Too short to be checked for a divergence: a" in short
    assert "no divergence" in MeasuredRuns(runs=(measure_log(numbers(30)),)).spikes()


def test_tensorboard_is_offered_where_a_run_wrote_its_files(tmp_path):
    found = measure_log(replace(numbers(12), source=tmp_path / "run.log"))
    assert "--logdir" not in MeasuredRuns(runs=(found,)).tensorboard()
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard/events.out.tfevents.1.host.2").touch()
    assert "1 of 1 runs" in (text := MeasuredRuns(runs=(found,)).tensorboard()) and "`tensorboard --logdir .`" in text
    assert str(tmp_path) not in text, "a report has no path of the machine"


def test_of_several_runs_in_a_file_each_has_its_number(tmp_path, capsys):
    run = DUMP + "".join(map(m2021, range(1, 11)))
    assert main(["logs", "parse", log(tmp_path, text=run * 2), log(tmp_path, "b.log")]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(" ")]
    assert [line.split(":")[0].removeprefix(f"{tmp_path}/") for line in heads] == [
        *("a.log, run 1 of 2", "a.log, run 2 of 2", "b.log")
    ]


def test_a_notebook_shows_the_first_of_many_runs_and_says_how_many_there_are(tmp_path):
    """Failed runs first; what cannot be right with its line; the order of a column; restarts."""
    wrong = m2021(4, loss=9.0).replace("rate: 1.000E-04", "rate: 7.000E+00")
    for number in range(45):
        text = DUMP + "".join(m2021(i, ms=1000.0 + number) for i in range(1, 11))
        text = text.replace(m2021(4, ms=1000.0 + number), wrong) if number == 7 else text
        (tmp_path / f"{number:02d}.log").write_text(text + ("ValueError: no\n" if number == 9 else ""))
    runs = measure_runs(Study("s"), str(tmp_path), sort="sec/it")
    assert (len(runs.endings().to_frame()), len(runs.efficiency().to_frame()), len(runs.drawn)) == (40, 40, 8)
    assert runs.endings().to_frame()["file"].tolist()[:2] == ["09.log", "00.log"]
    assert "**45** runs" in runs.summary() and "first 40 by Sec/it" in runs.summary()
    (problem,) = runs.problems().to_frame().to_dict("records")
    assert (problem["column"], problem["line"]) == ("learning_rate", 13) and runs.continuity().restarts == 0
    rates = [m.sec_per_it for m in runs.ranked]
    assert rates == sorted(rates) and len(str(runs)) < 20, "no text of a thousand rows lies in the notebook"
