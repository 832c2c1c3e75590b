"""Each table of data/dialects reads lines as its trainer prints them (the code that prints them is the table's source)."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from trilane.analysis.measure import numerics
from trilane.logs.dialects import tables
from trilane.logs.run import read_log, read_logs
from trilane.utils.validation import DATA

GIB, LN2 = 2**30, math.log(2)
# the name of a table: three iterations with what else the trainer prints, and columns of the last one. Numbers are ours.
SAMPLES = {
    "minimind": (
        "".join(
            f"Epoch:[{e}/2]({i}/39695), loss: {10.5 - e - i / 1e3:.4f}, logits_loss: 9.0000, aux_loss: 0.2500, lr: 0.00050000, epoch_time: 4767.0min\n"
            for e, i in ((1, 39600), (1, 39695), (2, 100))
        ),
        {"iteration": 39795, "epoch": 2, "train_iters": 79390, "lm_loss": 8.4, "aux_loss": 0.25, "learning_rate": 5e-4},
    ),
    "composer": (
        "".join(
            f"[batch={i}/20]:\n\t Train time/batch: {i - 1}\n\t Train time/token: {(i - 1) << 20}\n\t Train memory/current_reserved_mem: 30.5000\n"
            f"\t Train memory/peak_allocated_mem: 25.5000\n\t Train memory/peak_reserved_mem: 30.5000\n\t Train loss/train/total: {10.5 - i:.4f}\n"
            f"\t Train metrics/train/LanguageCrossEntropy: {10.5 - i:.4f}\n\t Train throughput/batches_per_sec: 0.0800\n\t Train throughput/device/batches_per_sec: 0.0100\n"
            "\t Train throughput/tokens_per_sec: 80000.5000\n\t Train throughput/device/tokens_per_sec: 10000.0625\n\t Train throughput/device/mfu: 0.4500\n"
            "\t Train time/train: 0.0080\n\t Train lr-DecoupledAdamW/group0: 0.0001\n\t Train time/secs_per_step: 12.5000\n"
            "[Eval batch=1/2] Eval on eval data\n[Eval batch=2/2] Eval on eval data:\n\t Eval metrics/eval/LanguageCrossEntropy: 9.5000\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 20, "lm_loss": 7.5, "sec_per_it": 12.5, "tokens_per_second": 80000.5}
        | {"tokens_per_gpu_per_second": 10000.0625, "mfu": 0.45, "max_allocated": 25.5e9, "max_reserved": 30.5e9},
    ),
    "composer bars": (
        "".join(
            f"\rtrain          Epoch   0:    3%|▋          | {i}/625 [00:{5 * i:02d}<07:23,  5.00s/ba, loss/train/total={10.5 - i:.4f}]"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 625, "lm_loss": 7.5, "sec_per_it": 5},
    ),
    "fairseq": (
        "".join(
            f"2024-11-01 12:0{i}:00 | INFO | train_inner | epoch 001:    {i}00 / 1640 loss={16.5 - i}, ppl=1024.5, wps=52480, ups=0.5, wpb=104960, bsz=205, num_updates={i}00, lr=1e-05, gnorm=1.25, loss_scale=16, train_wall=198, gb_free=9.5, wall={200 * i}\n"
            "2024-11-01 12:05:00 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 12.5 | ppl 5792.6 | wps 160000 | wpb 2048 | bsz 4 | num_updates 300\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 300, "lm_loss": 13.5 * LN2, "tokens_per_second": 52480, "global_batch_size": 205}
        | {"learning_rate": 1e-5, "grad_norm": 1.25, "sec_per_it": 2, "loss_scale": 16},
    ),
    "key-value of evaluations": (
        "".join(f"step {500 * i}: train loss {10.5 - i:.4f}, val loss {10.75 - i:.4f}\n" for i in (0, 1, 2)),
        {"iteration": 1000, "lm_loss": 8.5, "val_loss": 8.75},
    ),
    "key-value of epochs": (
        "".join(f"Epoch [{e}/3], Step [{i}/95], Loss: {10.5 - e - i / 100}\n" for e, i in ((1, 80), (1, 90), (2, 10))),
        {"iteration": 105, "epoch": 2, "train_iters": 190, "lm_loss": 8.4},
    ),
    "key-value of JSON": (
        "".join(f'{{"step": {i}, "loss": {10.5 - i}, "lr": 0.00025, "step_time_ms": 1250.5}}\n' for i in (1, 2, 3)),
        {"iteration": 3, "lm_loss": 7.5, "learning_rate": 2.5e-4, "sec_per_it": 1.2505},
    ),
    "key-value with words": (
        "".join(
            f"2024-11-01 12:00:0{i} Step {10 * i}/100, Train Loss: {10.5 - i:.4f}, Val Loss: 9.5, LR: 2.5e-4, dt: 125.5 ms, 5120 tok/s\n"
            f"[eval] Step {10 * i} Loss: 6.5\nValidation: step {10 * i}, loss 6.25\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 30, "train_iters": 100, "lm_loss": 7.5, "learning_rate": 2.5e-4, "sec_per_it": 0.1255},
    ),
    "key-value": (
        "".join(
            f'time=2024-11-01T12:00:{5 * i:02d}Z level=info msg="train" global_step={i} train/loss={10.5 - i} lr=2.5e-4 grad_norm=1.25 tokens_per_second_per_gpu=5120\n'
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "lm_loss": 7.5, "learning_rate": 2.5e-4, "grad_norm": 1.25, "sec_per_it": 5}
        | {"tokens_per_gpu_per_second": 5120},
    ),
    "lightning": (
        "".join(
            f"\rEpoch {e}:  {i}0%|█         | {i}/10 [00:{2 * i:02d}<00:45,  0.50it/s, v_num=0, train_loss={10.5 - e - i / 10}, val_loss=9.5]"
            for e, i in ((0, 9), (0, 10), (1, 1))
        ),
        {"iteration": 11, "epoch": 1, "train_iters": 20, "lm_loss": 9.4},
    ),
    "lingua": (
        "".join(
            f"{r}: INFO    24-11-01 12:00:0{2 * i}.500000 - 1 day, 0:01:0{2 * i} - step: {i}  acc: 0  loss: {10.5 - i + r / 8:>7}  grad: 2.50e+00  flops: 4.05e+14  wps: 5.25e+04  iter:  1.2525  data: 0.001  lr: 3.00e-06  mem: 65%  pow: 650.5 W\n"
            for i in (1, 2, 3)
            for r in (0, 1)
        ),
        {"iteration": 3, "lm_loss": 7.5, "grad_norm": 2.5, "flops_per_s_per_gpu": 405e12, "learning_rate": 3e-6}
        | {"tokens_per_gpu_per_second": 52500, "sec_per_it": 2},
    ),
    "lit-gpt": (
        "".join(
            f"iter {i} step {i // 2}: loss {10.5 - i / 2:.4f}, iter time: 400.50ms{'' if i % 2 else ' (optimizer.step)'} remaining time: 90.50 hours.  or 3.77 days. \n"
            for i in range(2, 7)
        ),
        {"iteration": 3, "lm_loss": 7.5},
    ),
    "llama-factory": (
        "".join(
            json.dumps(
                {"current_steps": 10 * i, "total_steps": 300, "loss": 3.5 - i / 2, "lr": 4.5e-05, "epoch": 0.25 * i}
                | {"percentage": 3.33, "elapsed_time": f"1:0{i}:40", "remaining_time": "0:55:00"}
                | {"throughput": 12345.5, "total_tokens": 1000}
            )
            + "\n"
            for i in (1, 2, 3)
        )
        + '{"current_steps": 30, "total_steps": 300, "eval_loss": 2.25, "epoch": 0.75, "percentage": 10.0, "elapsed_time": "1:03:50", "remaining_time": "0:50:00"}\n',
        {"iteration": 30, "train_iters": 300, "lm_loss": 2.0, "learning_rate": 4.5e-5, "epoch": 0.75, "sec_per_it": 6},
    ),
    "llm.c": (
        "val loss 11.000000\n"
        + "".join(
            f"step {i:4d}/74 | loss {10.5 - i:7.6f} (+nanz)| norm 2.5000 (+nanz)| lr 3.00e-04 | 125.50 ms | 45.5% bf16 MFU | 41776 tok/s\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 74, "lm_loss": 7.5, "grad_norm": 2.5, "learning_rate": 3e-4}
        | {"sec_per_it": 0.1255, "mfu": 0.455, "tokens_per_second": 41776},
    ),
    "modded-nanogpt": (
        "step:0/1750 val_loss:10.8258 train_time:0ms step_avg:nanms\n"
        + "".join(
            f"step:{i}/1750 train_loss:{10.5 - i:.4f} train_time:{250 * i}ms step_avg:{250 + i:.2f}ms\n"
            for i in (1, 2, 3)
        )
        + "step:3/1750 val_loss:7.2500 train_time:750ms step_avg:253.00ms\n",
        {"iteration": 3, "train_iters": 1750, "lm_loss": 7.5, "sec_per_it": 0.25},
    ),
    "ms-swift": (
        "{'eval_loss': 3.25, 'epoch': 0.0, 'global_step/max_steps': '0/300', 'elapsed_time': '1s'}\n"
        + "".join(
            f"Train:  {i}%|▏         | {5 * i}/300 [01:0{i}<41:47, 42.51s/it]{{'loss': '{4.5 - i}', 'grad_norm': '1.25', 'learning_rate': '9.75e-05', 'token_acc': '0.5', 'epoch': '0.25', 'global_step/max_steps': '{5 * i}/300', 'elapsed_time': '1h {i}m 30s', 'remaining_time': '41m 48s', 'memory(GiB)': '14.3', 'train_speed(s/it)': '95.5'}}\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 15, "train_iters": 300, "lm_loss": 1.5, "grad_norm": 1.25, "sec_per_it": 12, "epoch": 0.25},
    ),
    "nanochat": (
        "Step 00000 | Validation bpb: 3.250000\n"
        + "".join(
            f"step {i:05d}/21400 ({i / 214:.2f}%) | loss: {10.5 - i:.6f} | lrm: 1.00 | dt: 1250.50ms | tok/sec: 419,262 | bf16_mfu: 45.50 | epoch: 1 pq: 0 rg: 8 | total time: 0.50m\n"
            for i in range(3)
        ),
        {"iteration": 2, "train_iters": 21400, "lm_loss": 8.5, "sec_per_it": 1.2505, "tokens_per_second": 419262}
        | {"mfu": 0.455},
    ),
    "nanogpt": (
        "step 0: train loss 10.5000, val loss 10.7500\n"
        + "".join(
            f"iter {i}: loss {10.5 - i:.4f}, time 562.50ms, mfu {'-100.00' if i < 2 else '45.50'}%\n" for i in range(3)
        ),
        {"iteration": 2, "lm_loss": 8.5, "sec_per_it": 0.5625},
    ),
    "nanotron": (
        "".join(
            f"11/01/2024 12:00:0{i} [INFO|DP=0|PP=0|TP=0|n1]: iteration: {i} / 15000 | consumed_tokens: {2.1 * i:.3g}M | elapsed_time_per_iteration_ms: 1.67K | tokens_per_sec: 1.26M | tokens_per_sec_per_gpu: 78.6K | global_batch_size: 512 | lm_loss: {10.5 - i} | lr: 0.0003 | model_tflops_per_gpu: 119 | hardware_tflops_per_gpu: 121 | grad_norm: 2.5 | cuda_memory_allocated: 5.25G | cuda_max_memory_reserved: 12.5G | hd_total_memory_tb: 312G\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 15000, "lm_loss": 7.5, "sec_per_it": 1.67, "tokens_per_second": 1.26e6}
        | {"tokens_per_gpu_per_second": 78600, "max_reserved": 12.5e9, "learning_rate": 3e-4, "grad_norm": 2.5},
    ),
    "nemo-1": (
        "".join(
            f"\rEpoch 0: :  {i}0%|████▋     | {i}/10 [01:{10 * i}<07:13, v_num=, reduced_train_loss={11.5 - i:.2f}, global_step={i - 2:.3f}, consumed_samples={256 * (i - 1):.1f}, train_step_timing in s=9.950]"
            f"\rEpoch 0: :  {i}0%|████▋     | {i}/10 [01:{10 * i}<07:13, v_num=, reduced_train_loss={10.5 - i:.2f}, global_step={i - 1:.3f}, consumed_samples={256 * i:.1f}, train_step_timing in s=9.950]"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 10, "lm_loss": 7.5, "sec_per_it": 9.95},
    ),
    "nemo-1 of two epochs": (
        "".join(
            f"\rEpoch {e}:  {i}0%|████▋     | {i}/10 [00:{4 * i}<07:13, v_num=, reduced_train_loss={10.5 - e - i / 10:.2f}, train_step_timing in s=4.000]"
            for e, i in ((0, 9), (0, 10), (1, 1))
        ),
        {"iteration": 11, "epoch": 1, "train_iters": 20, "lm_loss": 9.4, "sec_per_it": 4},
    ),
    "nemo-2": (
        "".join(
            f"Training epoch 0, iteration {i}/99 | lr: 0.0006 | global_batch_size: 32 | global_step: {i} | reduced_train_loss: {10.5 - i} | train_step_timing in s: 1.675 | consumed_samples: {32 * (i + 1)} | val_loss: 9.75\n"
            for i in range(3)
        )
        + "Validation: iteration 1/4\n",
        {"iteration": 2, "train_iters": 99, "lm_loss": 8.5, "sec_per_it": 1.675, "global_batch_size": 32}
        | {"learning_rate": 6e-4},
    ),
    "olmo core": (
        "".join(
            f"2024-11-01 12:00:{10 * i:02d}.500\tnode1:0\tolmo_core.train.callbacks.console_logger:68\tINFO\t[step={i}/2000,epoch=1,eta=5h11m]\n    optim/total grad norm=2.500\n    optim/LR (group 0)=4.0E-05\n    train/CE loss={10.5 - i:.3f}\n    train/PPL=1,808\n"
            "    throughput/total tokens=12.5M\n    throughput/device/TPS=11,234\n    throughput/device/TPS (actual avg)=11,200\n    throughput/device/BPS=0.1025\n    throughput/device/MFU=42.50\n    gpu_memory/GPU reserved mem (GiB)=70.50\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 2000, "lm_loss": 7.5, "grad_norm": 2.5, "learning_rate": 4e-5, "mfu": 0.425}
        | {"tokens_per_gpu_per_second": 11234, "sec_per_it": 1 / 0.1025, "max_reserved": 70.5 * GIB},
    ),
    "progress-bar": (
        "\rLoading: 50%|█████     | 1/2 [00:01<00:01, 1.00s/it]\rEpoch 0:   1%|▏         | 3/300 [00:06<09:20, 2.00s/it, loss=9]\n"
        + "".join(
            f"\rSteps:   1%|▏         | {i}/300 [00:0{2 * i}<09:20,  2.00s/it, loss={10.5 - i}, lr=1e-5]"
            f"\rValidating:   1%|▏         | {5 + i}/300 [00:0{2 * i}<09:20,  2.00s/it, loss={9.5 - i}]"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 300, "lm_loss": 7.5, "learning_rate": 1e-5, "sec_per_it": 2},
    ),
    "t5x": (
        "".join(
            f"I1101 12:00:0{i}.025554 12803141632 logging_writer.py:48] [{100 * i}] collection=train accuracy=0.0125, cross_ent_loss={490.5 - i}, cross_ent_loss_per_all_target_tokens={10.5 - i}, learning_rate=0.01, loss={491.5 - i}, timing/seconds=200.5, timing/seqs_per_second=256.5, timing/steps_per_second=0.500, timing/target_tokens_per_second=131328.5, z_loss=0.25\n"
            for i in (1, 2, 3)
        )
        + "I1101 12:00:05.025554 12803141632 logging_writer.py:48] [300] collection=training_eval/lm accuracy=0.0125, cross_ent_loss_per_all_target_tokens=7.25\n",
        {"iteration": 300, "lm_loss": 7.5, "learning_rate": 0.01, "sec_per_it": 2, "tokens_per_second": 131328.5},
    ),
    "torchtitan": (
        "".join(
            f"[rank0]:[titan] 2024-11-01 12:00:0{2 * i},500 - root - INFO - step: {i:2d}  loss: {10.5 - i:8.5f}  grad_norm:  2.5000  memory:  9.50GiB(64.99%)  tps: 7,082  tflops: 45.50  mfu: 14.50%\n"
            for i in (1, 2, 3)
        )
        + "[rank0]:[titan] 2024-11-01 12:00:07,500 - root - INFO - validate step:  3  loss:  7.2500  memory:  9.50GiB(64.99%)  tps: 14,082\n",
        {"iteration": 3, "lm_loss": 7.5, "grad_norm": 2.5, "max_reserved": 9.5 * GIB, "mfu": 0.145, "sec_per_it": 2}
        | {"tokens_per_gpu_per_second": 7082, "flops_per_s_per_gpu": 45.5e12},
    ),
    "torchtune bars": (
        "".join(
            f"\r1|{i}|Loss: {10.5 - i}:   1%|▏         | {i}/300 [00:0{2 * i}<09:20,  2.00s/it]" for i in (1, 2, 3)
        ),
        {"iteration": 3, "epoch": 1, "lm_loss": 7.5, "sec_per_it": 2},
    ),
}
TABLES = sorted({path.stem for path in (DATA / "dialects").glob("*.json")} - {"megatron-2021", "deepspeed", "trilane"})


def read(folder, text):
    (folder / "a.log").write_text(text)
    (log,) = read_logs(folder / "a.log")
    return log


@pytest.mark.parametrize("sample", SAMPLES)
def test_a_table_reads_what_its_trainer_prints(tmp_path, sample):
    text, expected = SAMPLES[sample]
    log = read(tmp_path, text)
    assert (log.dialect, len(log.iterations)) == (sample.split()[0], 3)
    last = log.iterations.iloc[-1]
    assert {column: last.get(column, math.nan) for column in expected} == pytest.approx(expected)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_names_its_source_and_reads_no_line_of_another_trainer(name):
    table = tables.read_dialect(DATA / "dialects" / f"{name}.json")
    lines = {line: sample for sample, (text, _) in SAMPLES.items() for line in re.split("[\r\n]", text)}
    found = {sample.split()[0] for line, sample in lines.items() if table.iterations(line.encode())}
    assert table.fallback or (found <= {name} and table.source.startswith("https://github.com/"))


def test_lines_that_only_look_like_iterations_begin_no_run_of_their_own(tmp_path):
    text, _ = SAMPLES["nanogpt"]
    log = read(tmp_path, "our step 0 loss 9.5\n" + text.replace("iter 1:", "our step 0 loss 9.5\niter 1:"))
    assert (log.dialect, len(log.iterations), len(log.validation)) == ("nanogpt", 3, 1)


def test_ranks_that_print_a_loss_each_are_one_run_and_deepspeed_counts_steps_better(tmp_path):
    chat = [f"Epoch: 0, Step: {i}, Rank: {r}, loss = {10.5 - i + r / 8}\n" for i in range(8) for r in (0, 2, 1)]
    log = read(tmp_path, "".join(chat))
    assert (log.dialect, list(log.iterations["lm_loss"])) == ("key-value", [10.5 - i for i in range(8)])
    step = "[2024-11-01 12:00:0{i},000] [INFO] [logging.py:96:log_dist] [Rank 0] step={i}, skipped=0, lr=[0.001], mom=[[0.9, 0.95]]\n"
    for count in (2, 9):
        log = read(tmp_path, "".join(chat) + "".join(step.format(i=i) for i in range(1, count + 1)) + "".join(chat))
        assert (log.dialect, list(log.iterations["iteration"])) == ("deepspeed", list(range(1, count + 1)))


def test_epochs_whose_length_is_not_printed_are_runs_of_their_own(tmp_path):
    (tmp_path / "a.log").write_text("".join(f"epoch: {e} step: {i} loss: 3.5\n" for e in (1, 2) for i in (10, 20)))
    logs = read_logs(tmp_path / "a.log")
    assert [list(log.iterations["epoch"]) for log in logs] == [[1, 1], [2, 2]]
    assert [[problem.rule for problem in log.problems] for log in logs] == [["jumps-back"]] * 2


def test_a_line_cut_before_its_elapsed_time_gets_no_seconds_from_its_time_stamp(tmp_path: Path) -> None:
    line = "2020-07-15 08:34:5{n} | INFO | train_inner | epoch 001: {n} / 99 loss=9.{n}, ups=0.5, num_updates={n}, wall={w}\n"
    text = "".join(line.format(n=n, w=40 + 2 * n) for n in range(1, 6))
    (tmp_path / "a.log").write_text(text + line.format(n=6, w=52).partition(", wall")[0])
    (log,) = read_logs(tmp_path / "a.log")
    assert (
        log.status == "unfinished"
        and max(log.column("sec_per_it")[1:5]) < 3 > np.nan_to_num(log.column("sec_per_it"))[-1]
    )


@pytest.mark.parametrize("value", ["nan", "-inf"])
@pytest.mark.parametrize("sample", SAMPLES)
def test_a_line_whose_loss_is_no_number_is_an_iteration(tmp_path, sample, value):
    log = read(tmp_path, re.sub(r"(?<![\d.])8\.5\d*", value, SAMPLES[sample][0]))
    assert (log.dialect, len(log.iterations)) == (sample.split()[0], 3)


EVALUATION = "step 15: train loss 3.25, val loss 3.75, train ppl 14.07, val ppl 14.22\n"


def test_a_loss_of_held_out_text_among_iterations_is_an_evaluation(tmp_path):
    lines = [f"it {i}: step {i:,} loss 3.5\n" for i in (10, 999, 1000)]
    log = read(tmp_path, EVALUATION + lines[0] + EVALUATION + "".join(lines[1:]))
    assert (list(log.iterations["iteration"]), len(log.validation)) == ([10, 999, 1000], 1)
    iterations = "".join(f"iter {i}: loss 3.5, ppl 33.12, time 453.50ms, mfu 0.42%\n" for i in (10, 20))
    log = read(tmp_path, EVALUATION + iterations + EVALUATION)
    assert (log.dialect, list(log.iterations["sec_per_it"]), len(log.validation)) == ("nanogpt", [0.4535] * 2, 1)


LEADS = {
    "a pod": "[train-worker-0 pytorch] ",
    "a stamp": "2024-05-01T10:00:{:02d}.{:03d}Z stdout F ",
    "a pod and a stamp": "train-0 2024-05-01 10:00:{:02d},{:03d}: rank0[99][MainThread]: INFO: ",
}


@pytest.mark.parametrize("name", ["composer", "olmo core"])
@pytest.mark.parametrize("lead", LEADS)
def test_a_block_of_lines_is_read_behind_what_collectors_put_before_each(tmp_path, name, lead):
    text, expected = SAMPLES[name]
    lines = text.splitlines(keepends=True)
    log = read(tmp_path, "".join(LEADS[lead].format(n // 9, n) + line for n, line in enumerate(lines)))
    last = {column: log.iterations[column].iloc[-1] for column in expected if column in log.iterations}
    assert last == pytest.approx({c: v for c, v in expected.items() if c in last}) and "lm_loss" in last


LAST = {
    "nemo-2": "Training epoch 0, iteration 9/9 | lr: 0.0006 | reduced_train_loss: 7.5 | train_step_timing in s: 1.675\n",
    "modded-nanogpt": "step:1750/1750 train_loss:3.5 train_time:437500ms step_avg:250.00ms\n",
    "nanochat": "step 00099/00100 (99.00%) | loss: 3.5 | lrm: 1.00 | dt: 1250.50ms | tok/sec: 419,262 | bf16_mfu: 45.50 | epoch: 1\n",
    "olmo": "[step=100/100,epoch=0]\n    train/CrossEntropyLoss=3.5\n",
}


@pytest.mark.parametrize("name", LAST)
def test_a_run_that_reached_its_last_iteration_is_completed(tmp_path, name):
    log = read(tmp_path, LAST[name] + "bye\n")
    assert (log.dialect, log.status) == (name, "completed")


def test_a_bar_takes_no_loss_from_what_another_writer_printed_behind_it(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    bar = "  4%|#4        | {0}/100 [00:{0:02d}<01:12,  1.32it/s][2024-02-01 10:00:{0:02d}][INFO][trainer:837] - "
    log.write_text("".join(f"{bar.format(n)}step={n + 1} loss={3.6 - n / 100}\n" for n in range(4, 50, 5)))
    assert read_log(log).iterations["iteration"].tolist() == list(range(5, 51, 5))


def test_fairseqs_bars_on_one_line_do_not_mix_their_numbers(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    bar = "epoch 001:   1%| | {0}/9000 [00:10<09:00, 1.1it/s, loss={1}, ppl=9, wps=900, num_updates={0}, lr=1e-5]"
    log.write_text(
        "".join(f"{bar.format(n, 11 + n / 1e3)}\n" for n in (574, 575)) + bar.format(576, 11.5) + bar.format(577, 11.9)
    )
    read = read_log(log).iterations
    assert read["iteration"].tolist() == [574, 575, 576, 577]
    assert read["lm_loss"].tolist() == pytest.approx([x * 0.693147 for x in (11.574, 11.575, 11.5, 11.9)], rel=1e-5)


@pytest.mark.parametrize("between", ["^M", "\r", ""])
def test_each_bar_on_one_line_is_an_iteration(tmp_path: Path, between: str) -> None:
    log = tmp_path / "a.log"
    bars = [f"Training:  {n}%|#| {n}/100 [00:{n:02d}<01:40, 1.00it/s, loss={3 - n / 10:.3f}]" for n in range(1, 9)]
    log.write_text(between.join(bars) + "\n")
    read = read_log(log).iterations
    assert read["iteration"].tolist() == list(range(1, 9))
    assert read["lm_loss"].tolist() == [float(f"{3 - n / 10:.3f}") for n in range(1, 9)]


def test_lines_with_a_loss_and_a_held_out_loss_each_are_iterations(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    lines = [
        f"step={n} loss={4 - n / 100} train_loss={4.1 - n / 100} val_loss=3.9 lr=1e-4\n" for n in range(10, 80, 10)
    ]
    log.write_text("".join(lines))
    assert read_log(log).iterations["iteration"].tolist() == list(range(10, 80, 10))


@pytest.mark.parametrize(
    "text",
    [
        "step {0} best loss 2.9 kl loss 0.1 lr 1e-4 loss {1}\n",
        "inner step 3 | step {0} | avg loss: 3.3 | loss: {1}\n",
        '{{"prev loss": 3.7, "local step": 5, "step": {0}, "min loss": 2.0, "train loss": {1}}}\n',
    ],
)
def test_a_number_of_something_else_is_neither_the_loss_nor_the_step(tmp_path: Path, text: str) -> None:
    log = tmp_path / "a.log"
    log.write_text("".join(text.format(n, 4 - n / 100) for n in range(10, 80, 10)))
    read = read_log(log).iterations
    assert read["iteration"].tolist() == list(range(10, 80, 10))
    assert read["lm_loss"].tolist() == [4 - n / 100 for n in range(10, 80, 10)]


@pytest.mark.parametrize("prefix", ["[rank{}]: ", ""])
def test_bars_of_several_ranks_whose_losses_differ_are_marked(tmp_path: Path, prefix: str) -> None:
    log = tmp_path / "a.log"
    bar = "Training: {0}%|#| {0}/100 [00:{1:02d}<03:20, 2.00s/it, loss={2:.4f}]\n"
    log.write_text(
        "".join(prefix.format(r) + bar.format(n, 2 * n, 3 - n / 50 + r / 100) for n in range(1, 12) for r in range(4))
    )
    read = read_log(log)
    assert read.iterations["iteration"].tolist() == list(range(1, 12))
    assert [problem.rule for problem in read.problems] == ["copies"]


def test_a_bar_that_is_drawn_before_its_loss_is_known_is_not_marked(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    bar = "Training: {0}%|#| {0}/100 [00:{1:02d}<03:20, 2.00s/it, loss={2:.4f}]\r"
    log.write_text("".join(bar.format(n, 2 * n, 3 - k / 50) for n in range(1, 12) for k in (n - 1, n)))
    read = read_log(log)
    assert read.problems == () and read.iterations["lm_loss"].tolist() == [3 - n / 50 for n in range(1, 12)]


def test_llama_factorys_two_reporters_count_an_iteration_once(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text(
        "".join(
            f"  1%|#| {n}/300 [00:{n:02d}<05:00,  1.00s/it]\n[INFO|callbacks.py:157] 10:00 >> {{'loss': {2 - n / 99:.4f}, "
            f"'learning_rate': 4.9997e-05, 'epoch': 0.01}}\n{{'loss': {2 - n / 99:.4f}, 'grad_norm': 1.5, 'learning_rate': 4.99973e-05, "
            "'epoch': 0.01}\n"
            for n in range(5, 50, 5)
        )
    )
    read = read_log(log).iterations
    assert read["iteration"].tolist() == list(range(5, 50, 5)) and set(read["grad_norm"]) == {1.5}


@pytest.mark.parametrize("between", ["", " ", "^M"])
@pytest.mark.parametrize("sample", ["nanogpt", "torchtitan", "nanotron", "modded-nanogpt"])
def test_iterations_on_one_line_where_a_lines_end_was_lost_are_all_read(
    tmp_path: Path, sample: str, between: str
) -> None:
    lines = SAMPLES[sample][0].splitlines()
    losses = read(tmp_path, "\n".join(lines) + "\n").column("lm_loss").tolist()
    joined = [one + between + other for one, other in zip(lines[::2], [*lines[1::2], ""], strict=False)]
    assert read(tmp_path, "\n".join(joined) + "\n").column("lm_loss").tolist() == losses


def test_a_hole_that_a_file_system_left_is_passed_over(tmp_path: Path) -> None:
    one, *more = SAMPLES["nanogpt"][0].splitlines(keepends=True)
    (tmp_path / "a.log").write_bytes(one.encode() + bytes(4096) + "".join(more).encode())
    assert (
        read_log(tmp_path / "a.log").column("lm_loss").tolist()
        == read(tmp_path, one + "".join(more)).column("lm_loss").tolist()
    )


def test_skipped_steps_that_deepspeed_counts_behind_a_bar_are_the_runs(tmp_path: Path) -> None:
    bar = "  8%|#| {0}/2410 [00:{1:02d}<05:00,  1.00s/it][2023-05-01 10:00:{1:02d},000] [INFO] [Rank 0] step={0}, skipped={2}, lr=[0.001]\n"
    text = "".join(
        bar.format(n, n // 50, n - 5) + f"{{'loss': {6 - n / 999:.4f}, 'epoch': 0.1}}\n" for n in range(500, 2100, 500)
    )
    (tmp_path / "a.log").write_text(text)
    assert numerics(read_log(tmp_path / "a.log")).skipped == 1995


def test_a_bar_after_an_evaluation_of_another_epoch_numbers_no_dict_before_it(tmp_path: Path) -> None:
    text = "{{'loss': {}, 'epoch': {}}}\n"
    dicts = "".join(text.format(2 - e, e) for e in (0.03, 0.06)) + "{'eval_loss': 1.1, 'epoch': 0.07}\n"
    log = read(tmp_path, dicts + "  2%|#| 50/2019 [24:43<15:52:05, 29.01s/it]\n")
    assert [problem.rule for problem in log.problems] == ["unnumbered"] and len(log.iterations) == 2


@pytest.mark.parametrize(("other", "rules"), [(1.01, []), (1.5, ["copies"])])
def test_two_reporters_of_one_iteration_may_round_its_loss_and_not_more(
    tmp_path: Path, other: float, rules: list[str]
) -> None:
    nanogpt = "iter {n}: loss {loss:.4f}, time 137.21ms, mfu 34.10%\n"
    torchtune = "Step {n} | loss:{more} lr:2e-05 tokens_per_second_per_gpu:57.8\n"
    text = "".join((nanogpt + torchtune).format(n=n, loss=6 - n / 9, more=other * (6 - n / 9)) for n in range(1, 9))
    log = read(tmp_path, text)
    assert [problem.rule for problem in log.problems] == rules and len(log.iterations) == 8


def test_a_prefix_before_nothing_does_not_part_a_trainers_dict_from_its_bar(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    parts = [
        f"{{'loss': {3 - n / 99:.4f}, 'epoch': 0.01}}\n\n  1%|#| {n}/300 [00:{n:02d}<05:00,  1.00s/it]\n"
        for n in (10, 20, 30)
    ]
    log.write_text("".join(f"[{i}] {line}\n" for i, line in enumerate("".join(parts).split("\n"), 1743)))
    assert read_log(log).iterations["iteration"].tolist() == [10, 20, 30]


def test_litgpts_last_lines_end_the_run(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    line = "Epoch 1 | iter {0} step {0} | loss train: 1.{0}, val: n/a | iter time: 300.50 ms (step)\n"
    log.write_text("".join(line.format(n) for n in range(1, 9)) + "Training time: 583.36s\nMemory used: 14.49 GB\n")
    assert read_log(log).status == "completed"


def test_a_run_whose_every_loss_is_nan_ended_by_it_however_short_it_is(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    line = "step {0:4d}/74 | loss     nan (+nanz)| norm    nan (+nanz)| lr 3.00e-04 | 36.62 ms | 9.2% bf16 MFU | 111903 tok/s\n"
    log.write_text("".join(line.format(n) for n in (18, 19, 20)))
    assert read_log(log).status == "NaN loss"
