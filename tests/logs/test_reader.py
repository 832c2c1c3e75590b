"""What a log's lines show about order: whose iterations they are, which numbers they have, when and
where they stand.
"""

import pytest
from test_log_dialects import TITAN, m2021

from trilane.analysis.measure import measure_log
from trilane.logs.run import read_logs


def runs(folder, text):
    (folder / "a.log").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_logs(folder / "a.log")


def bar(n, total=100, loss=""):
    return f"Epoch 0:  {n}%|#| {n}/{total} [00:{n:02d}<01:40, 1.00it/s{loss}]"


def hf(loss):
    return f"{{'loss': {loss}, 'grad_norm': tensor(1.25, device='cuda:0'), 'learning_rate': 4.9e-05, 'epoch': 0.1}}\n"


# deepspeed/runtime/engine.py and deepspeed/utils/timer.py of
# https://github.com/deepspeedai/DeepSpeed
STEP = "[2026-01-01 10:{m:02d}:{s:02d},{ms:03d}] [INFO] [logging.py:96:log_dist] [Rank 0] step={i}, skipped=4, lr=[4.9e-05], mom=[(0.9, 0.95)]\n"
RATE = "[2026-01-01 10:{m:02d}:{s:02d},{ms:03d}] [INFO] [timer.py:1:stop] epoch=0/micro_step={g}/global_step={g}, RunningAvgSamplesPerSec=30.5, CurrSamplesPerSec=31.5\n"


def deepspeed(first, at=0):
    times = [(5 * k, 17100 * k) for k in range(1, 6)]  # five iterations of 3.42 s
    return "".join(
        (STEP + RATE).format(m=at + ms // 60000, s=ms // 1000 % 60, ms=ms % 1000, i=first + g, g=g)
        for g, ms in times
    )


START = "using world size: 8, data-parallel-size: 1, tensor-model-parallel size: 8, pipeline-model-parallel size: 1\n"
MANY, UP = "".join(m2021(i, 99) for i in range(1, 30)), [*range(1, 9)]
NANOGPT = "iter {}: loss {:.4f}, time 137.21ms, mfu 34.10%\n"
EVALUATION = "step 15: train loss 3.25, val loss 3.75, train ppl 14.07, val ppl 14.22\n"
# the lines of a log, and the iterations of each run in it
ORDER = {
    "copies of a rank": ("".join(f"[default{r}]:" + m2021(i) for i in UP for r in (3, 7)), [UP]),
    "ranks of a host, of which each has its own loss": (
        "".join(f"gpu2: [rank{r}]:" + m2021(i).replace("5.000000E+00", f"{5 + r}.0E+00") for i in UP for r in (3, 7)),
        [UP],
    ),
    "the same number with another loss": ("0: " + m2021(5) + "0: " + m2021(5, loss=4.5), [[5], [5]]),
    "a restart": (MANY + "".join(m2021(i, 99) for i in range(20, 25)), [[*range(1, 30)], [*range(20, 25)]]),
    "evaluations of nanoGPT": (EVALUATION + NANOGPT.format(10, 3.5) + EVALUATION + NANOGPT.format(20, 3.5), [[10, 20]]),
    "bars of ranks": ("\n".join(bar(n, loss=f", v_num=0, train_loss={n + r}") for n in UP for r in range(4)), [UP]),
    "two runs of DeepSpeed": (deepspeed(136000) + deepspeed(136010, 30), [[*range(136005, 136030, 5)], [*range(136015, 136040, 5)]]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "numbers"), ORDER.values(), ids=ORDER)
def test_each_iteration_is_read_once_in_its_run(tmp_path, text, numbers):
    found = runs(tmp_path, text)
    assert [run.column("iteration").tolist() for run in found] == numbers


def dicts(numbers):
    return "".join(hf(9 - k / 10) for k in range(len(numbers)))


def beside(numbers):
    return "".join(f"{bar(n, 200)}{hf(4 - n / 100)}" for n in numbers)


TRAINER = {
    "steps of all": (beside([10, 20, 30]), [10, 20, 30]),
    "bars on lines before": ("".join(f"{bar(n)}\n \n{hf(n)}" for n in (10, 20)), [10, 20]),
    "one without": (hf(4.0) + beside([35, 40, 45]), [None] * 4),
    "nothing": (dicts([10, 20, 30]), [None, None, None]),
    "two reporters": ("".join(f"{bar(n)}\n10:00 >> {hf(n)[:-2].replace('4.9e-05', '4.9001e-05')}\n{hf(n)}" for n in (10, 20)), [10, 20]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "numbers"), TRAINER.values(), ids=TRAINER)
def test_a_trainers_losses_have_the_steps_that_the_log_shows_or_none(tmp_path, text, numbers):
    (log,) = runs(tmp_path, text + "done\n")
    assert [None if n != n else n for n in log.iterations["iteration"]] == numbers
    assert [problem.rule for problem in log.problems] == ["unnumbered"] * (None in numbers)


def test_seconds_are_of_the_clock_the_bar_or_the_runtime_and_not_of_a_rounded_rate(tmp_path):
    """The Trainer rounds its rate to 0.001: 1024 steps of 136.5 s come out as 0.007 steps per
    second, or 142.9 s.
    """
    end = "{'train_runtime': 139776.0, 'train_steps_per_second': 0.007}\n"
    (log,) = runs(tmp_path, ">>   Total optimization steps = 1,024\n" + TRAINER["nothing"][0] + end)
    assert (measure_log(log).sec_per_it, log.status) == (136.5, "completed")
    (log,) = runs(tmp_path, TRAINER["nothing"][0] + end)
    assert measure_log(log).sec_per_it != measure_log(log).sec_per_it, (
        "two digits are no measurement"
    )
    (log,) = runs(tmp_path, deepspeed(136000))
    assert log.iterations["sec_per_it"].median() == pytest.approx(3.42, rel=1e-3)


def test_memory_and_loss_are_those_of_the_ranks_that_have_them(tmp_path):
    text = "".join(
        f"[default0]:[rank{r}]:" + TITAN.format(i=i, loss=5.0 if r else -1)
        for i in (1, 2)
        for r in (0, 8)
    )
    (log,) = runs(tmp_path, text)
    assert list(log.iterations["lm_loss"]) == [5.0, 5.0]
    report = "[Rank {}] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: {}.5 | reserved: 3.0"
    (log,) = runs(tmp_path, m2021(1) + report.format(1, 10) + report.format(0, 20) + "\n")
    assert log.memory["max_allocated"] / 2**20 == 20.5


PREFIXES = ["jz-a100-3: ", " 3: ", "[rank3]:", "[1,3]<stdout>:", "[pod/train-3/main] "]
PREFIXES += ["[default7]:", "2026-01-01 10:00:00,123 - INFO - "]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_stands_before_a_line_takes_nothing_from_it(tmp_path, prefix):
    timers = "(min, max) time across ranks (ms):\n    optimizer .......................: (10.00, 20.00)\n"
    step = '{"iteration": %d, "sec_per_it": 0.5, "lm_loss": 2.5}\n'
    for text in (m2021(1) + timers + m2021(2), step % 1 + step % 2, TRAINER["steps of all"][0]):
        plain = runs(tmp_path, text)
        found = runs(tmp_path, "".join(prefix + line for line in text.splitlines(True)))
        assert len(found) == len(plain) == 1 and found[0].iterations.equals(plain[0].iterations)
        assert found[0].timers.equals(plain[0].timers)


FAILED = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no such index\n'
SRUN = "srun: error: r1n1: task 6: Exited with exit code 1\n"
LAUNCHES = {
    "after one that completed": (START + m2021(10) + "[after training is done]\n" + START + FAILED, ["completed", "crashed"]),
    "before one that trains": (START + FAILED + SRUN + START + m2021(1) + m2021(10), ["crashed", "completed"]),
    "without a word": (START + m2021(10) + START + "loading\n", ["completed", "unfinished"]),
}  # fmt: skip


@pytest.mark.parametrize(("text", "statuses"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_launch_that_trains_nothing_is_a_run_of_its_own(tmp_path, text, statuses):
    assert [log.status for log in runs(tmp_path, text)] == statuses


def test_a_form_that_held_nothing_is_read_once_other_digits_give_it_values(tmp_path):
    """`0 oom_kill events` and `step=0` report nothing, others do; a dump that every rank prints is
    read in each run.
    """
    killed = "slurmstepd: error: Detected {} oom_kill events in StepId=42.0.\n"
    (log,) = runs(tmp_path, MANY + killed.format(0) * 30 + killed.format(1))
    assert log.status == "host memory"
    first = STEP.format(m=0, s=0, ms=0, i=0)
    (log,) = runs(tmp_path, first * 30 + first.replace("step=0", "step=9"))
    assert log.column("iteration").tolist() == [9]
    dump = "---------------- arguments ----------------\n  hidden_size ......... 64\n  a_method_whose_name_is_without_dots  7\n---------------- end of arguments ----------------\n"
    *_, log = runs(tmp_path, (START + dump * 20 + m2021(1)) * 2)
    assert (log.arguments["hidden_size"], log.arguments["a_method_whose_name_is_without_dots"]) == (
        64,
        7,
    )
