"""Lines as other versions of the trainers print them: the forms vary, the meaning does not."""

import gzip

import pytest
from test_endings import FIVE

from trilane.logs.run import read_log, read_logs

TAIL = "number of skipped iterations:   0 | number of nan iterations:   0 |\n"
DS = "[2026-01-01 10:{m:02d}:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step={i}, skipped=4, lr=[4.9e-05, 4.9e-05], mom=[(0.9, 0.95)]\n"
TITAN = "[rank{r}]:[titan] 2026-05-18 16:08:{s:02d},958 - root - INFO - step: {i:2d}  loss:  2.5000  grad_norm:  0.5348  memory:  9.50GiB(64.99%)  tps: 7,08{r}  tflops: 0.50  mfu: {mfu}\n"
MEGATRON_2019 = " iteration      200/  320000 | elapsed time per iteration (ms): 571.5 | learning rate 9.900E-05 | lm loss 6.125000E+00 | loss scale 32768.0 |\n"
VARIANTS = [
    (
        "no colons",
        MEGATRON_2019,
        {"sec_per_it": 0.5715, "lm_loss": 6.125, "learning_rate": 9.9e-5, "loss_scale": 32768},
    ),
    (
        "now and on average",
        " [2025-09-01 10:00:00] iteration       10/      50 | consumed samples:          320 | elapsed time per iteration (ms): 5012.5/5100.2 | hip mem usage/free/total/usage_ratio: 120.33GB/71.65GB/191.98GB/62.68% | throughput per GPU (TFLOP/s/GPU): 512.5/505.1 | tokens per GPU (tokens/s/GPU): 9000.5/8900.2 | lm loss: 8.5E+00 | "
        + TAIL,
        {"sec_per_it": 5.0125, "flops_per_s_per_gpu": 512.5e12, "tokens_per_gpu_per_second": 9000.5},
    ),
    (
        "without an end",
        " iteration       10/infinity | consumed samples:          320 | elapsed time per iteration (ms): 5000.0 | lm loss: 8.5E+00 | "
        + TAIL,
        {"iteration": 10, "sec_per_it": 5.0, "lm_loss": 8.5},
    ),
    (
        "another order, more fields",
        " [2026-01-01 10:00:00.000000] iteration       10/      50 | skipped samples:            0 | lm loss: 8.5E+00 | mtp_1 loss: 8.1E+00 | energy per GPU (J/iter/GPU): 3000.1 | grad norm: 1.5 | params norm: 12.5 | num zeros: 3.0 | elapsed time per iteration (ms): 5000.0 | "
        + TAIL,
        {"sec_per_it": 5.0, "lm_loss": 8.5, "mtp_1_loss": 8.1, "params_norm": 12.5, "num_zeros": 3.0, "grad_norm": 1.5},
    ),
    (
        "every rank prints",
        "".join(TITAN.format(r=r, s=10 + i, i=i, mfu="N/A") for i in (7, 8) for r in (0, 1)),
        {"iteration": 8, "sec_per_it": 1.0, "lm_loss": 2.5, "max_reserved": 9.5 * 2**30},
    ),
    (
        "every tenth step",
        "".join(TITAN.format(r=0, s=10 + i, i=i, mfu="1.5%") for i in (10, 20, 30)),
        {"iteration": 30, "sec_per_it": 1.0, "mfu": 0.015},
    ),
    ("a clock for DeepSpeed", DS.format(m=0, i=10) + DS.format(m=5, i=20), {"iteration": 20, "sec_per_it": 30.0}),
    (
        "of 2021",
        "[2021-05-01 10:00:00,000] [INFO] [timer.py:154:stop] 0/100, SamplesPerSec=12.5\n",
        {"iteration": 100, "samples_per_second": 12.5},
    ),
    (
        "a bar that writes over itself",
        "\r  4%|▎ | 1294/36234 [11:25<5:08:51,  1.89it/s]\r  4%|▎ | 1295/36234 [11:25<5:08:37,  1.89it/s]\r    \r{'loss': 1.125, 'epoch': 0.21}\n"
        "\r  4%|▎ | 1297/36234 [11:26<5:13:42,  1.86it/s]\r  4%|▎ | 1299/36234 [11:27<5:13:42,  1.86it/s]\r{'loss': 1.25, 'epoch': 0.22}\n",
        {"iteration": 1299, "lm_loss": 1.25, "sec_per_it": 0.5},
    ),
    (
        "an epoch of many steps, on two nodes",
        "+ python train.py --logging_steps 5\n"
        + "".join(
            2 * f"{{'loss': {loss}, 'grad_norm': 1.5, 'learning_rate': 1e-05, 'epoch': 0.01}}\n"
            for loss in (1.5, 1.25, 1.0)
        ),
        {"iteration": 15, "lm_loss": 1.0},
    ),
]


@pytest.mark.parametrize(("kind", "text", "expected"), VARIANTS, ids=[kind for kind, *_ in VARIANTS])
@pytest.mark.parametrize("prefix", ["", "noise\n" * 40])
def test_another_version_means_the_same(tmp_path, kind, text, expected, prefix):
    (tmp_path / "a.log").write_text(prefix + text)
    row = read_log(tmp_path / "a.log").iterations.iloc[-1]
    assert {name: row[name] for name in expected} == pytest.approx(expected)


HF_DICT = "{{'loss': {loss}, 'grad_norm': tensor(1.25, device='cuda:0'), 'learning_rate': 4.9e-05, 'epoch': 0.1}}\n"
HF_BAR = " {i}%|##        | {i}/{n} [00:{s:02d}<05:00,  5.00it/s]\n"


@pytest.mark.parametrize("blank", ["", "          \n", "\n\n"])
@pytest.mark.parametrize(("before", "late"), [(True, 0), (True, 1), (False, 0)])
def test_a_bar_on_a_line_of_its_own_has_the_step_of_the_dict_next_to_it(tmp_path, blank, before, late):
    text = "Map: 100%|##| 1000/1000 [00:01<00:00, 900.00it/s]\n"
    for i in (10, 20, 30):
        bar, behind = (HF_BAR.format(i=i + more, n=200, s=i // 5) for more in (0, late))
        text += (bar if before else "") + blank + HF_DICT.format(loss=4 - i / 100) + blank + behind
        text += HF_BAR.format(i=3, n=7, s=1)  # an evaluation's
    (tmp_path / "a.log").write_text(text + HF_DICT.format(loss=3.5) + "done\n")
    table = read_log(tmp_path / "a.log").iterations
    assert table["iteration"].tolist() == [10, 20, 30, 40] and table["lm_loss"].tolist() == [3.9, 3.8, 3.7, 3.5]
    assert table["sec_per_it"].tolist()[1:3] == [0.2, 0.2] and set(table["grad_norm"]) == {1.25}


def test_bars_behind_the_numbers_of_lines_have_the_steps_of_their_dicts(tmp_path):
    lines = []
    for i in (10, 20, 30):
        bar = HF_BAR.format(i=i, n=200, s=i // 5)
        lines += [bar, "   \n", HF_DICT.format(loss=4 - i / 100), " \n", bar]
    (tmp_path / "a.log").write_text("".join(f"[{1700 + at}] {line}" for at, line in enumerate(lines)))
    assert read_log(tmp_path / "a.log").iterations["iteration"].tolist() == [10, 20, 30]


@pytest.mark.parametrize(
    ("steps", "numbers"),
    [((35, 40, 45), [30, 35, 40, 45]), ((40, 50, 60), [30, 40, 50, 60]), ((36, 41, 46), None), ((35, 45, 50), None)],
)
def test_dicts_without_a_bar_are_numbered_by_the_others_where_these_are_equally_far_apart(tmp_path, steps, numbers):
    text = HF_DICT.format(loss=4.0)
    for at, i in enumerate(steps):
        text += HF_BAR.format(i=i, n=625, s=i).rstrip() + HF_DICT.format(loss=3.5 - at / 10)
    (tmp_path / "a.log").write_text(text)
    table = read_log(tmp_path / "a.log").iterations
    found = table["iteration"].tolist() if "iteration" in table else []
    assert found == numbers if numbers else all(number != number for number in found), found
    if numbers:
        assert table["sec_per_it"].tolist()[-1] == 1


def test_a_dict_with_a_loss_is_a_step_even_with_the_time_since_the_start(tmp_path):
    text = "{{'loss': '{}', 'grad_norm': '2.5', 'learning_rate': '0.0002', 'train_runtime': '{}', 'epoch': '0.0{}'}}\n"
    (tmp_path / "a.log").write_text("".join(text.format(9 - i, 30 * i, i) for i in (1, 2, 3)) + "more\n")
    log = read_log(tmp_path / "a.log")
    assert log.iterations["lm_loss"].tolist() == [8, 7, 6] and log.status != "completed"


@pytest.mark.parametrize("late", [False, True])
def test_memory_of_the_set_up_alone_is_said_to_be_that(tmp_path, late):
    held = "[INFO] [utils.py:801:see_memory_usage] MA 1.93 GB         Max_MA 1.93 GB         CA 1.94 GB         Max_CA 2 GB \n"
    (tmp_path / "a.log").write_text(held + FIVE + held * late)
    assert any("set-up" in note for note in read_log(tmp_path / "a.log").notes) is not late


def test_seconds_that_were_read_off_the_clock_are_reported_as_such(tmp_path):
    (tmp_path / "a.log").write_text(DS.format(m=0, i=10) + DS.format(m=5, i=20))
    assert "time stamps" in read_log(tmp_path / "a.log").notes[0]
    (tmp_path / "a.log").write_text(FIVE + DS.format(m=0, i=10) + DS.format(m=5, i=20))
    assert read_log(tmp_path / "a.log").notes == (), "Megatron says its seconds itself"


def test_a_form_that_held_nothing_is_read_once_other_digits_give_it_values(tmp_path, monkeypatch):
    """Forms of lines that hold nothing are remembered from block to block; `0 oom_kill events` and `step=0` say nothing, others do."""
    monkeypatch.setattr("trilane.logs.reading.blocks.BLOCK", 500)
    killed = "slurmstepd: error: Detected {} oom_kill events in StepId=42.0.\n"
    (tmp_path / "a.log").write_text(killed.format(0) * 30 + FIVE + killed.format(0) * 30 + killed.format(1))
    assert read_log(tmp_path / "a.log").status == "host memory"
    (tmp_path / "a.log").write_text(DS.format(m=0, i=0) * 30 + DS.format(m=5, i=9))
    assert list(read_log(tmp_path / "a.log").iterations["iteration"]) == [9]


def test_a_dump_that_every_rank_prints_is_read_anew_in_the_next_run(tmp_path, monkeypatch):
    monkeypatch.setattr("trilane.logs.reading.blocks.BLOCK", 500)
    start = "using world size: 8, data-parallel-size: 8\n"
    dump = "---------------- arguments ----------------\n  hidden_size ......... 64\n  a_name_that_is_long  7\n---------------- end of arguments ----------------\n"
    (tmp_path / "a.log").write_text((start + dump * 20 + FIVE) * 2)
    log = read_log(tmp_path / "a.log")
    assert (log.arguments["hidden_size"], log.arguments["a_name_that_is_long"]) == (64, 7)


def test_many_copies_in_one_gzip_file_are_read_as_one_stream(tmp_path):
    parts = [gzip.compress(line.encode() + b"\n") for line in FIVE.splitlines()]
    (tmp_path / "a.log").write_bytes(b"".join(parts))
    assert len(read_log(tmp_path / "a.log").iterations) == 5


RESTARTED = "".join(f"step={i} loss={9 - i / 10:.2f}\n" for i in (*range(1, 21), *range(8, 16)))
COPIED = "".join(f"step={i} loss={9 - i / 10 + copy:.2f}\n" for i in range(1, 9) for copy in (0, 0.05))


@pytest.mark.parametrize(("text", "rows"), [(RESTARTED, [20, 8]), (COPIED, [8])], ids=("restart", "copies"))
def test_lines_of_words_and_numbers_that_repeat_iterations_are_a_restart_or_marked_copies(tmp_path, text, rows):
    (tmp_path / "a.log").write_text(text)
    runs = read_logs(tmp_path / "a.log")
    assert [len(run.iterations) for run in runs] == rows
    assert ("copies" in {problem.rule for problem in runs[0].problems}) == (text is COPIED)


SWIFT = "{{'loss': {loss:.1f}, 'epoch': 0.1, 'global_step/max_steps': '{i}/94', 'percentage': '1%', 'elapsed_time': '{i}m 0s', 'remaining_time': '1h'}}"
FAIRSEQ = "| epoch 001: {i} / 900 loss={loss:.1f}, ppl=99.5, wps=500, num_updates={i}, lr=1e-05, gnorm=1.5, wall={i}0\n"
LIT_GPT = "iter {i}0 | step {i}: loss {loss:.1f}, iter time: 89.50 ms{end}\n"
ROWS = {i: 9.5 - i for i in range(1, 5)}
JOINED = " ".join(SWIFT.format(i=i, loss=loss) for i, loss in ROWS.items()) + "\n"
SKIPPING = "".join(
    LIT_GPT.format(i=i, loss=loss, end=" (optimizer.step)" if i == 2 else "") for i, loss in ROWS.items()
)


@pytest.mark.parametrize("text", [JOINED, SKIPPING], ids=("dicts on one line", "lines between optimizer steps"))
def test_no_iteration_is_lost(text, tmp_path):
    (tmp_path / "a.log").write_text(text)
    rows = read_log(tmp_path / "a.log").iterations
    assert dict(zip(rows["iteration"], rows["lm_loss"], strict=True)) == ROWS


def test_one_step_that_does_not_fit_numbers_no_other_losses(tmp_path):
    dicts = [f"{{'loss': {9 - i}.5, 'learning_rate': 0.001, 'epoch': 0.0{i}}}\n" for i in range(1, 6)]
    bar = "  8%|##   | 1999/24128 [1:52:09<20:27:23,  3.33s/it][2026-01-01 10:00:00,000] [INFO] a line of another logger\n"
    (tmp_path / "a.log").write_text("".join([*dicts[:3], bar, *dicts[3:]]))
    log = read_log(tmp_path / "a.log")
    assert (len(log.iterations), log.first_iteration, log.last_iteration) == (5, None, None)
    assert [note for note in log.notes if "does not number" in note]


def test_the_last_step_of_an_epoch_completes_no_run(tmp_path):
    lines = [f"[Epoch {e}] step {i}/20 loss {9 - e - i / 20:.2f}\n" for e in (0, 1) for i in (10, 20)]
    (tmp_path / "a.log").write_text("".join(lines))
    log = read_log(tmp_path / "a.log")
    assert (log.last_iteration, log.status == "completed") == (40, False)
