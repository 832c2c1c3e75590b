"""Every dialect, written by us a few lines each: the iterations once, in our units, and what stands around them."""

import json
import re

import numpy as np
import pytest
from support import REPOSITORY

from trilane.logs.run import read_log, read_logs

RAW = REPOSITORY.parent / "shared/rawlogs"
M2021 = " iteration {i:8d}/{n:8d} | consumed samples: {c:12d} | elapsed time per iteration (ms): {ms:.1f} | learning rate: 1.000E-04 | global batch size: {b:5d} | lm loss: {loss:.6E} | loss scale: 1024.0 | grad norm: 1.250 | number of skipped iterations: {k:3d} | number of nan iterations:   0 |\n"
M2022 = " iteration {i:8d}/      20 | consumed samples: {c:12d} | consumed tokens: {t:12d} | elapsed time per iteration (s): {s:.2f} | learning rate: 3.787E-06 | global batch size:  2048 | lm loss: {loss:.6E} | grad norm: 2.763 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: {r:.3f} | TFLOPs: 107.48 |\n"
NEOX = " samples/sec: 40.000 | iteration        3/      10 | elapsed time per iteration (ms): 800.0 | learning rate: 6.000E-05 | approx flops per GPU: 57.6TFLOPS | lm_loss: 4.250000E+00 | loss scale: 65536.0 | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
FORK = " iteration        4/      10 | consumed samples:          128 | consumed tokens:       262144 | elapsed time per iteration (ms): 1600.0 | learning rate: 1.0E-04 | global batch size:    32 | lm loss: 5.0E+00 | loss scale: 1.0 | grad norm: 1.5 | actual seqlen:  2048 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 20.0 | tokens per gpu per second (tgs): 5120.0 | TFLOPs: 88.10 |\n"
TITAN = "\x1b[31mstep: {i:2d}  \x1b[32mloss:  {loss:.4f}  \x1b[38;2;180;60;0mgrad_norm:  1.5000  \x1b[36mmemory: 38.50GiB(40.53%)  \x1b[34mtps: 7,812  \x1b[33mtflops: 312.50  \x1b[35mmfu: 31.60%\x1b[39m\n"


def m2021(i, n=10, ms=2000.0, loss=5.0, k=0, b=4):
    return M2021.format(i=i, n=n, c=b * i, ms=ms, loss=loss, k=k, b=b)


def m2022(i, s=700.0, loss=6.0):
    return M2022.format(i=i, c=2048 * i, t=2048 * 2048 * i, s=s, loss=loss, r=2048 / s)


def read(folder, text):
    (folder / "a.log").write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_log(folder / "a.log")


DIALECTS = [
    ("megatron-2021", m2021(3), {"iteration": 3, "sec_per_it": 2.0, "lm_loss": 5.0, "consumed_samples": 12}),
    ("megatron-deepspeed-2022", m2022(2), {"sec_per_it": 700.0, "flops_per_s_per_gpu": 107.48e12}),
    ("gpt-neox", NEOX, {"iteration": 3, "sec_per_it": 0.8, "lm_loss": 4.25, "flops_per_s_per_gpu": 57.6e12}),
    ("deepspeedai", FORK, {"iteration": 4, "sec_per_it": 1.6, "tokens_per_gpu_per_second": 5120, "seq_length": 2048}),
    ("deepspeed", "steps: 7 loss: 3.5000 iter time (s): 0.250 samples/sec: 64.000\n", {"iteration": 7, "lm_loss": 3.5}),
    (
        "deepspeed",
        "[2026-01-01 10:00:00,000] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=2, lr=[3e-05], mom=[(0.9, 0.95)]\n"
        "[INFO] [timer.py:1:stop] epoch=0/micro_step=80/global_step=10, RunningAvgSamplesPerSec=30.5, CurrSamplesPerSec=31.5, "
        "MemAllocated=4.25GB, MaxMemAllocated=20.5GB\n",
        {"iteration": 10, "skipped_total": 2, "samples_per_second": 31.5},
    ),
    ("hf-trainer", "{'loss': 2.5, 'grad_norm': 0.75, 'learning_rate': 5e-05, 'epoch': 0.1}\n", {"lm_loss": 2.5}),
    (
        "hf-trainer",
        " 5%|▌  | 5/100 [00:10<03:10]{'loss': '2.5', 'epoch': '0.05'}\n",
        {"iteration": 5, "train_iters": 100},
    ),
    ("torchtitan", TITAN.format(i=9, loss=4.125), {"iteration": 9, "lm_loss": 4.125, "flops_per_s_per_gpu": 312.5e12}),
    (
        "trilane",
        '{"iteration": 2, "sec_per_it": 0.5, "tflops": 1.5, "lm_loss": NaN}\n',
        {"flops_per_s_per_gpu": 1.5e12},
    ),
]


@pytest.mark.parametrize(
    ("dialect", "text", "expected"), DIALECTS, ids=[f"{d}-{i}" for i, (d, *_) in enumerate(DIALECTS)]
)
def test_each_dialect_is_read_in_seconds_flops_and_bytes(tmp_path, dialect, text, expected):
    log = read(tmp_path, "noise before\n" + text)
    assert (log.dialect, len(log.iterations)) == (dialect, 1)
    assert {name: log.iterations[name].iloc[0] for name in expected} == expected


@pytest.mark.parametrize("count", [2, 400])
@pytest.mark.parametrize("prefix", ["", "[default7]:", "0: ", "[rank3]:", "r6i5n1: "])
def test_a_few_lines_and_many_are_read_alike(tmp_path, prefix, count):
    """Many lines of one form are read by array operations, few one by one: the numbers are the same to the last bit."""
    draw = np.random.default_rng(1)
    rows = [(i, round(x, 1), float(f"{y:.6E}")) for i, (x, y) in enumerate(draw.lognormal(3, 3, (count, 2)), 1)]
    log = read(tmp_path, "".join(prefix + m2021(i, 1000, ms, loss) for i, ms, loss in rows))
    assert list(log.iterations["iteration"]) == [i for i, _, _ in rows]
    assert list(log.iterations["sec_per_it"]) == [ms / 1e3 for _, ms, _ in rows]
    assert list(log.iterations["lm_loss"]) == [loss for _, _, loss in rows]


def test_glued_lines_are_taken_apart(tmp_path):
    memory = "[Rank {}] (after 1 iterations) memory (MB) | allocated: 1.0 | max allocated: {}.5 | reserved: 3.0 | max reserved: 4.0"
    text = m2021(1).rstrip("\n") + m2021(2) + memory.format(1, 10) + memory.format(0, 20) + "\n" + m2021(3)
    log = read(tmp_path, text)
    assert list(log.iterations["iteration"]) == [1, 2, 3]
    assert list(log.memory["max_allocated"] / 2**20) == [20.5, 10.5]


@pytest.mark.parametrize("width", [60, 79, 80, 100, 132, 200])
@pytest.mark.parametrize("keep_blanks", [True, False])
def test_a_line_that_a_terminal_wrapped_is_put_together(tmp_path, width, keep_blanks):
    def wrap(line):
        parts = [line[i : i + width] for i in range(0, len(line), width)]
        return "\n".join(parts if keep_blanks else [p.rstrip() for p in parts]) + "\n"

    log = read(tmp_path, "".join(wrap(m2021(i, loss=4.5 + i).rstrip("\n")) + "other line\n" for i in range(1, 40)))
    assert list(log.iterations["lm_loss"]) == [4.5 + i for i in range(1, 40)]
    assert set(log.iterations["sec_per_it"]) == {2.0} and set(log.iterations["skipped"]) == {0}


def test_a_skipped_iteration_has_no_loss(tmp_path):
    skipped = re.sub(r"lm loss: \S+ \| ", "", m2021(2, k=1))
    log = read(tmp_path, m2021(1) + skipped + m2021(3))
    assert list(log.iterations["lm_loss"].isna()) == [False, True, False]
    assert list(log.iterations["skipped"]) == [0, 1, 0]


def test_a_cut_line_gives_no_cut_number(tmp_path):
    whole = m2021(5)
    for end in range(len(whole) - 1):
        log = read(tmp_path, m2021(4) + whole[:end])
        if len(log.iterations) == 2:
            row = log.iterations.iloc[1].dropna()
            assert (row.sec_per_it, row.get("lm_loss", 5.0), row.get("global_batch_size", 4)) == (2.0, 5.0, 4)


def test_another_ranks_copy_is_not_counted_twice(tmp_path):
    lines = [f"[default{r}]:" + m2021(i, loss=5 - i / 10) for i in range(1, 30) for r in (3, 7)]
    assert list(read(tmp_path, "".join(lines)).iterations["iteration"]) == list(range(1, 30))
    assert list(read(tmp_path, "".join(m2021(i) * 2 for i in range(1, 30))).iterations["iteration"]) == list(
        range(1, 30)
    )


def test_of_torchtitans_ranks_the_one_with_the_loss_counts(tmp_path):
    lines = [f"[rank{r}]:" + TITAN.format(i=i, loss=5.0 if r else -1.0) for i in (1, 2) for r in (0, 1)]
    log = read(tmp_path, "".join(lines))
    assert list(log.iterations["lm_loss"]) == [5.0, 5.0]
    assert list(log.memory["rank"]) == [0, 1]


def test_two_runs_in_one_file_come_out_as_two(tmp_path):
    first, second = "".join(map(m2021, range(1, 60))), "".join(map(m2021, range(40, 80)))
    (tmp_path / "a.log").write_text(first + second)
    assert [len(r.iterations) for r in read_logs(tmp_path / "a.log")] == [59, 40]
    start = (
        "using world size: 8, data-parallel-size: 1, tensor-model-parallel size: 8, pipeline-model-parallel size: 1\n"
    )
    (tmp_path / "a.log").write_text(start + first + start + "".join(map(m2021, range(60, 70))))
    runs = read_logs(tmp_path / "a.log")
    assert [len(r.iterations) for r in runs] == [59, 10], "a restart goes on counting"
    assert [r.arguments["world_size"] for r in runs] == [8, 8]


def test_mixed_dialects_are_runs_of_their_own(tmp_path):
    (tmp_path / "a.log").write_text("".join(map(m2021, range(1, 30))) + TITAN.format(i=50, loss=2) + m2022(1))
    assert [(r.dialect, len(r.iterations)) for r in read_logs(tmp_path / "a.log")] == [
        ("megatron-2021", 29),
        ("torchtitan", 1),
        ("megatron-deepspeed-2022", 1),
    ]


def test_a_unit_that_changes_under_its_label_is_put_right(tmp_path):
    log = read(tmp_path, "".join(m2021(i, 100, ms=2000.0 if i < 20 else 2.1) for i in range(1, 40)))
    assert (
        set(log.iterations["sec_per_it"]) == {2.0, 2.1} and "19 iterations" not in log.notes and "20 " in log.notes[0]
    )
    wrong = m2022(3).replace("(s): 700.00", "(s): 700000.00")
    assert list(read(tmp_path, m2022(2) + wrong).iterations["sec_per_it"]) == [700.0, 700.0]
    per_ms = m2021(1, ms=384505.8, b=2048).replace(" |\n", " | samples per second: 0.005 | TFLOPs: 35.24 |\n")
    (row,) = read(tmp_path, per_ms).iterations.to_dict("records")
    assert (row["sec_per_it"], row["samples_per_second"]) == pytest.approx((384.5058, 5)), (
        "the rate lies, not the label"
    )
    slow_start = "".join(m2021(i, 100, ms=90000.0 if i == 1 else 80.0) for i in range(1, 40))
    assert read(tmp_path, slow_start).notes == (), "compiling is no change of unit"


def test_a_unit_that_changes_and_changes_back_is_put_right_only_in_between(tmp_path):
    """Two parts of a run printed seconds under the label of milliseconds."""
    label = [2000.0 if i < 20 or i >= 40 else 2.0 for i in range(1, 60)]
    log = read(tmp_path, "".join(m2021(i, 100, ms=ms) for i, ms in enumerate(label, 1)))
    assert set(log.iterations["sec_per_it"]) == {2.0} and log.notes[0].startswith("20 iterations")


def test_a_bar_of_hours_is_a_clock_too(tmp_path):
    """tqdm prints H:MM:SS from an hour on: 100 steps in 1:30:00, the next 100 by 2:00:00."""
    bar = " 1%|# | {}/900 [{}<9:00:00, 36.00s/it]{{'loss': {}, 'epoch': 0.1}}\n"
    log = read(tmp_path, bar.format(100, "1:30:00", 2.5) + bar.format(200, "2:00:00", 2.25))
    assert log.iterations["sec_per_it"].iloc[1] == 18.0


def test_timers_of_both_forms_are_seconds(tmp_path):
    old = "time (ms) | forward-compute: 148.03 | backward-compute: 415.50 | batch-generator: 2.50\n"
    new = "(min, max) time across ranks (ms):\n    forward-backward ...............................: (1200.00, 1300.00)\n    optimizer ......................................: (10.00, 20.00)\n"
    log = read(tmp_path, "".join(m2021(i) + old for i in range(1, 30)) + m2021(30) + new)
    assert list(log.timers["iteration"]) == list(range(1, 31))
    assert set(log.timers["forward-compute"].dropna()) == {0.14803}
    last = log.timers.iloc[-1]
    assert (last["forward-backward"], last["forward-backward min"], last["optimizer"]) == (1.3, 1.2, 0.02)


def test_a_line_broken_by_another_rank_spoils_nothing(tmp_path):
    """A timer named twice, a number with two points, a count beyond all counts: each made an error once."""
    glued = "time (ms) | forward: 1.0 | forward: 2.0 | iteration: 3.0\n"
    text = (
        m2021(1)
        + glued
        + "steps: 9 loss: 1.2.3 iter time (s): 1..5 samples/sec: .\n"
        + m2021(2).replace("8 |", "9" * 30 + " |", 1)
    )
    log = read(tmp_path, text + m2021(3))
    assert list(log.iterations["sec_per_it"]) == [2.0] * 3 and list(log.timers["forward"]) == [0.001]


def test_memory_of_deepspeed_keeps_the_most(tmp_path):
    line = "[INFO] [utils.py:1:see_memory_usage] MA {} GB         Max_MA {} GB         CA 6.0 GB         Max_CA 6 GB \n"
    log = read(tmp_path, line.format(3.5, 9.25) + line.format(3.5, 4.0) + m2021(1))
    assert list(log.memory["max_allocated"]) == [9.25 * 2**30]


def test_arguments_come_from_dumps_and_traces(tmp_path):
    text = (
        "+ srun bash -c 'python pretrain_gpt.py --num-layers 40 --lr 1e-4 --fp16 --wandb-api-key abc --data-path \"a b\"'\n"
        "------------------------ arguments ------------------------\n"
        "  hidden_size ..................................... 6144\n"
        "  activations_checkpoint_method_that_is_long  None\n"
        "  fp16 ............................................ True\n"
        "-------------------- end of arguments ---------------------\n"
        " > padded vocab (size: 50257) with 431 dummy tokens (new size: 50688)\n"
        "[INFO] [config.py:752:print]   zero_optimization_stage ...... 3\n"
    )
    arguments = read(tmp_path, text + m2021(1)).arguments
    expected = {"num_layers": 40, "lr": 1e-4, "hidden_size": 6144, "fp16": True, "padded_vocab_size": 50688}
    assert {name: arguments[name] for name in expected} == expected
    assert arguments["activations_checkpoint_method_that_is_long"] is None
    assert arguments["deepspeed.zero_optimization_stage"] == 3 and arguments["wandb_api_key"] == "(hidden)"


def test_the_flops_profiler_and_the_gpus_are_read(tmp_path):
    text = (
        "|   0  Tesla V100-SXM2...  Off  | 00000000:1A:00.0 Off |                    0 |\n"
        "| N/A   46C    P0    44W / 300W |   1024MiB / 32510MiB |      0%      Default |\n"
        "fwd+bwd+step FLOPS per GPU:                                             103.5 TFLOPS\n"
        "iter latency:                                                           1.25 s\n"
    )
    log = read(tmp_path, text + m2021(1))
    assert (log.devices[0].name, log.devices[0].used_bytes) == ("Tesla V100-SXM2...", 2**30)
    assert log.summary == {"profiler: fwd+bwd+step FLOPS per GPU": 103.5e12}


def test_bandwidth_benches_are_rates_in_bytes(tmp_path):
    bench = "0:\n duration: 0.5 sec\n algo throughput: 80000000000.0 bps, 80.0000 Gbps\n busbw: 60.0000  Gbps\n"
    row = read(tmp_path, bench).bandwidth.iloc[0]
    assert (row["rank"], row.seconds, row.algorithm_bytes_per_s, row.bus_bytes_per_s) == (0, 0.5, 1e10, 7.5e9)
    tests = "  1048576  262144  float  sum  -1   100.0  10.49  19.66  0  99.0  10.59  19.86  0\n# Avg bus bandwidth    : 19.7\n"
    log = read(tmp_path, tests)
    assert (log.dialect, log.status, log.bandwidth.bus_bytes_per_s.iloc[0]) == ("nccl-tests", "completed", 19.66e9)
    assert (log.bandwidth.seconds.iloc[0], log.bandwidth.message_bytes.iloc[0]) == (100e-6, 2**20), "it prints us"


@pytest.mark.skipif(not RAW.is_dir(), reason="the folder of real logs is not beside this checkout")
@pytest.mark.parametrize("path", sorted(RAW.glob("gpt2-meg*")) if RAW.is_dir() else [], ids=lambda p: p.name[:40])
def test_every_line_of_a_real_log_is_read_once_and_equal(path):
    """Against a plain reading of the text that shares no code with ours."""
    text = path.read_text(errors="replace")
    lines = re.findall(r"iteration +(\d+)/ *\d+ \|(.*)", text)
    (log,) = read_logs(path)
    assert len(lines) > 2 and list(log.iterations["iteration"]) == [int(n) for n, _ in lines]
    words = {"elapsed time per iteration \\(ms\\)": "sec_per_it", "lm.loss": "lm_loss", "loss scale": "loss_scale"}
    words |= {"learning rate": "learning_rate", "grad norm": "grad_norm", "number of skipped iterations": "skipped"}
    for word, column in words.items():
        found = [re.search(word + r": +([-\d.E+]+)", rest) for _, rest in lines]
        values = [float(f[1]) / (1e3 if column == "sec_per_it" else 1) if f else np.nan for f in found]
        if any(found):
            np.testing.assert_array_equal(log.iterations[column], values)
    ranks = {int(n) for n in re.findall(r"\[Rank (\d+)\] \(after", text)}
    assert len(log.memory) == len(ranks) or not ranks
    most = max(map(float, re.findall(r"max allocated: ([\d.]+)", text)), default=0)
    assert (log.memory["max_allocated"].max() if len(log.memory) else 0) == pytest.approx(most * 2**20)
    assert len(log.timers) == len(re.findall(r"\ntime \(ms\) \| (?:forward|backward)", text)) + 1


@pytest.mark.skipif(not RAW.is_dir(), reason="the folder of real logs is not beside this checkout")
def test_real_logs_without_megatrons_lines_are_read_too():
    (run,) = read_logs(next(RAW.glob("gpt2-hf*base*")))
    assert run.summary["train_runtime"] == 919.097 and run.arguments["n_embd"] == 7168 and run.status == "completed"
    assert [r.status for r in read_logs(next(RAW.glob("gpt2-hf*perf*")))] == ["crashed", "crashed", "completed"]
    for path in RAW.glob("bandwidth*"):
        (run,) = read_logs(path)
        assert len(run.bandwidth) == path.read_text().count("busbw: ")
        assert run.bandwidth.groupby("rank").size().max() == 5, "five trials a rank"


def test_our_own_steps_are_the_text_of_the_terminal(tmp_path):
    rows = [{"iteration": i, "sec_per_it": 0.25, "tflops": 2.0, "lm_loss": 5.5, "skipped": 0} for i in range(1, 30)]
    log = read(tmp_path, "".join(json.dumps(row) + "\n" for row in rows))
    assert (log.dialect, len(log.iterations), set(log.iterations["lm_loss"])) == ("trilane", 29, {5.5})
