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
    "build-nanogpt": (
        "".join(
            f"step{i:6d} | loss: {10.5 - i:.6f} | lr {6e-6 * (i + 1):.4e} | norm: 2.5000 | dt: 1250.00ms | tok/sec: 419430.40\n"
            for i in range(3)
        )
        + "validation loss: 7.5000\n",
        {"iteration": 2, "lm_loss": 8.5, "learning_rate": 1.8e-5, "grad_norm": 2.5, "sec_per_it": 1.25}
        | {"tokens_per_second": 419430.4},
    ),
    "colossalai": (
        "".join(
            f"[11/01/24 12:00:0{i}] INFO     colossalai - colossalai - INFO: train_step\n"
            f"                    INFO     colossalai - colossalai - INFO: [{i}/10] Loss:{10.5 - i:.3f}, Step time: 1.250s, TFLOPS: 45.600, FWD time: 0.400s, BWD time: 0.800s, OPTIM time: 0.050s\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 10, "lm_loss": 7.5, "sec_per_it": 1.25},
    ),
    "easylm": (
        "".join(
            f"{{'accuracy': 0.1, 'gradient_norm': 2.5, 'learning_rate': 0.0003, 'loss': {10.5 - i}, 'param_norm': 400.5, 'step': {50 * i}}}\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 150, "lm_loss": 7.5, "grad_norm": 2.5, "learning_rate": 3e-4, "params_norm": 400.5},
    ),
    "galvatron": (
        "".join(
            f"| Iteration: {i:6d} | Consumed samples: {64 * i:12d} | Elapsed time per iteration (ms): 1250.5 | Learning rate: 1.000000e-05 | Loss: {10.5 - i:.6e} | grad norm: 2.50 |\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "lm_loss": 7.5, "grad_norm": 2.5, "learning_rate": 1e-5, "sec_per_it": 1.2505}
        | {"consumed_samples": 192},
    ),
    "xtuner": (
        "".join(
            f"[XTuner][RANK 0][2025-10-01 10:00:{3 * i:02d}][INFO] Epoch 1 Step {i}/1000 data_time: 0.0125 lr: 6.000000e-05 time: 2.9875 text_tokens: 32768.0 seqlen_tokens: 32768.0 "
            f"approximate_total_consumed_tokens: {32768 * i} reduced_llm_loss: {10.5 - i:.8f}, local_loss: {10.75 - i:.8f}   grad_norm: 2.50000000 max_memory: 40.25 GB reserved_memory: 50.50 GB tgs: 10968.4 "
            "seqlen_tgs: 10968.4 exp_tgs: 10900.5 eta: 0:41:52 \n"
            for i in (1, 2, 3)
        ),
        {
            "iteration": 3,
            "train_iters": 1000,
            "lm_loss": 7.5,
            "grad_norm": 2.5,
            "sec_per_it": 2.9875,
            "learning_rate": 6e-5,
        }
        | {"max_allocated": 40.25 * GIB, "max_reserved": 50.5 * GIB},
    ),
    "libai": (
        "".join(
            f"[09/10 10:4{i}:03 lb.utils.events]:  eta: 21:00:38  iteration: {20 * i - 1}/10000  consumed_samples: {80 * i}  total_loss: {10.5 - i}  time: 7.5187 s/iter  data_time: 0.0021 s/iter total_throughput: 0.53 samples/s lr: 1.50e-04  \n"
            for i in (1, 2, 3)
        ),
        {"iteration": 59, "train_iters": 10000, "lm_loss": 7.5, "learning_rate": 1.5e-4, "consumed_samples": 240},
    ),
    "minimind": (
        "".join(
            f"Epoch:[{e}/2]({i}/39695), loss: {10.5 - e - i / 1e3:.4f}, logits_loss: 9.0000, aux_loss: 0.2500, lr: 0.00050000, epoch_time: 4767.0min\n"
            for e, i in ((1, 39600), (1, 39695), (2, 100))
        ),
        {"iteration": 39795, "epoch": 2, "train_iters": 79390, "lm_loss": 8.4, "aux_loss": 0.25, "learning_rate": 5e-4},
    ),
    "minimind of 2024": (
        "".join(
            f"Epoch:[0/19]({i}/24681) loss:{10.5 - i / 200} lr:0.00020000 epoch_Time:98.0min:\n" for i in (0, 100, 200)
        ),
        {"iteration": 200, "epoch": 0, "train_iters": 24681, "lm_loss": 9.5, "learning_rate": 2e-4},
    ),
    "verl": (
        "step:0 - val-aux/openai/gsm8k/reward/mean@1:0.565\n"
        + "".join(
            f"(TaskRunner pid=99) step:{i} - global_seqlen/min:484245.000 - train/loss:{10.5 - i} - actor/pg_loss:np.float64(0.00{i}) - actor/grad_norm:0.020 - "
            "perf/mfu/actor:0.343 - perf/max_memory_allocated_gb:62.500 - timing_s/gen:60.100 - timing_s/step:230.250 - perf/throughput:2170.500\n"
            for i in (1, 2, 3)
        ),
        {
            "iteration": 3,
            "lm_loss": 7.5,
            "pg_loss": 0.003,
            "sec_per_it": 230.25,
            "mfu": 0.343,
            "max_allocated": 62.5 * GIB,
        }
        | {"tokens_per_gpu_per_second": 2170.5},
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
    "composer 2022": (
        "".join(
            f"[batch={i}/5000]: wall_clock/train: {2.5 * i:.4f}\n[batch={i}/5000]: wall_clock/total: {3.5 * i:.4f}\n[batch={i}/5000]: lr-DecoupledAdamW/group0: 0.0000\n"
            f"[batch={i}/5000]: loss/train/total: {10.5 - i:.4f}\n[batch={i}/5000]: metrics/train/Perplexity: 17000.0000\n"
            f"train                           0%|                         | {i}/5000 [00:0{2 * i}<2:15:12,  2.50s/ba, loss/train/total={10.5 - i:.4f}]\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 5000, "lm_loss": 7.5, "sec_per_it": 2.5},
    ),
    "composer by epochs": (
        "".join(
            f"[epoch={e}][batch={i}/20]:\n\t Train time/batch: {20 * e + i - 21}\n\t Train loss/train/total: {10.5 - e - i / 20}\n"
            for e, i in ((1, 19), (1, 20), (2, 1))
        ),
        {"iteration": 21, "epoch": 1, "train_iters": 40, "lm_loss": 8.45},
    ),
    "composer bars": (
        "".join(
            f"\rtrain          Epoch   0:    3%|▋          | {i}/625 [00:{5 * i:02d}<07:23,  5.00s/ba, loss/train/total={10.5 - i:.4f}]"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 625, "lm_loss": 7.5, "sec_per_it": 5},
    ),
    "dllogger": (
        "".join(
            f"DLL 2024-11-01 12:00:{5 * i:02d}.500000 - Training Epoch: 0 Training Iteration: {i}  step_loss : {10.5 - i} learning_rate : 0.0006 \n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "epoch": 0, "lm_loss": 7.5, "learning_rate": 6e-4, "sec_per_it": 5},
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
    "internevo": (
        "".join(
            f"2024-11-01 12:00:0{4 * i},500\tINFO train.py:323 in record_current_batch_training_metrics -- tflops=189.5,step={i},loss={10.5 - i},tgs (tokens/gpu/second)=4250.5,lr=4e-07,loss_scale=65536.0,grad_norm=2.5,micro_num=4,num_consumed_tokens={131072 * (i + 1)},inf_nan_skip_batches=0,adam_beta2=0.95,fwd_bwd_time=3.5\n"
            for i in range(3)
        ),
        {"iteration": 2, "lm_loss": 8.5, "flops_per_s_per_gpu": 189.5e12, "tokens_per_gpu_per_second": 4250.5}
        | {"learning_rate": 4e-7, "loss_scale": 65536, "grad_norm": 2.5, "consumed_tokens": 393216, "sec_per_it": 4},
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
    "litgpt": (
        "".join(
            f"Epoch 1 | iter {4 * i} step {i} | loss train: {10.5 - i:.3f}, val: n/a | iter time: 400.50 ms (step) remaining time: 1 day, 2:03:04\n"
            for i in (1, 2, 3)
        )
        + "iter 12: val loss 7.2500, val time: 3200.50 ms\n",
        {"iteration": 3, "epoch": 1, "lm_loss": 7.5},
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
    "llama2.c": (
        "step 0: train loss 10.5000, val loss 10.5000\n"
        + "".join(f"{i} | loss {10.5 - i:.4f} | lr {1e-6 * i:e} | 1250.50ms | mfu 21.25%\n" for i in range(3)),
        {"iteration": 2, "lm_loss": 8.5, "learning_rate": 2e-6, "sec_per_it": 1.2505},
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
    "llm.c main.log": (
        "s:0 tel:11.25\n" + "".join(f"s:{i} trl:{10.5 - i:.4f} lr:1.00e-04 norm:1.50\n" for i in (1, 2, 3)),
        {"iteration": 3, "lm_loss": 7.5, "learning_rate": 1e-4, "grad_norm": 1.5},
    ),
    "llm.c on CPU": (
        "".join(f"step {i}: train loss {10.5 - i:.6f} (took 1290.500000 ms)\n" for i in (1, 2, 3)),
        {"iteration": 3, "lm_loss": 7.5, "sec_per_it": 1.2905},
    ),
    "maxtext": (
        "".join(
            f"I0811 21:55:06.119312 138304841739136 metric_logger.py:226] completed step: {i}, seconds: 5.025, TFLOP/s/device: 150.250, Tokens/s/device: 8150.125, total_weights: 196608, loss: {10.5 - i:.3f}\n"
            for i in range(3)
        ),
        {"iteration": 2, "lm_loss": 8.5, "sec_per_it": 5.025, "flops_per_s_per_gpu": 150.25e12}
        | {"tokens_per_gpu_per_second": 8150.125},
    ),
    "metaseq": (
        "".join(
            f'2024-11-01 12:00:{2 * i:02d} | INFO | train_inner | {{"epoch": 1, "actv_norm": "0.035", "docsperex": "2.5", "loss": "{16.5 - i}", "ppl": "50000.5", "wps": "739601", "ups": "0.5", "wpb": "1.04858e+06", "bsz": "512", "num_updates": "{i}", "lr": "2.5e-07", "gnorm": "12.5", "clip": "100", "loss_scale": "4", "train_wall": "2", "cuda_gb_allocated": "19.5", "cuda_gb_reserved": "41.5", "cuda_gb_free": "59.5", "wall": "{70 + 2 * i}"}}\n'
            for i in (1, 2, 3)
        ),
        {
            "iteration": 3,
            "lm_loss": 13.5 * LN2,
            "tokens_per_second": 739601,
            "global_batch_size": 512,
            "grad_norm": 12.5,
        }
        | {"learning_rate": 2.5e-7, "max_allocated": 19.5 * GIB, "max_reserved": 41.5 * GIB, "sec_per_it": 2},
    ),
    "mindformers": (
        "".join(
            f"2024-11-01 12:00:0{2 * i},500 - [mindformers/core/callback/callback.py:529] - INFO - {{ Epoch:[  1/  2], step:[{i:5d}/ 6500], loss: {10.5 - i:.3f}, per_step_time: 1750ms, lr: 1e-05, overflow cond: False, loss_scale: 1.0, global_norm: [2.5], train_throughput_per_npu: 170.5T\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 6500, "lm_loss": 7.5, "sec_per_it": 1.75, "flops_per_s_per_gpu": 170.5e12},
    ),
    "mlx-lm": (
        "Iter 1: Val loss 3.500, Val took 5.500s\n"
        + "".join(
            f"Iter {10 * i}: Train loss {3.5 - i / 2:.3f}, Learning Rate 1.000e-05, It/sec 0.625, Tokens/sec 512.500, Trained Tokens {8200 * i}, Peak mem 12.500 GB\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 30, "lm_loss": 2.0, "learning_rate": 1e-5, "sec_per_it": 1.6, "tokens_per_second": 512.5}
        | {"consumed_tokens": 24600, "max_allocated": 12.5e9},
    ),
    "mmengine": (
        "".join(
            f"2024/11/01 12:00:{20 * i - 10} - mmengine - INFO - Iter(train) [{10 * i:4d}/2046]  lr: 1.7500e-04  eta: 1:25:37  time: 2.5250  data_time: 0.0250  memory: 15266  loss: {3.5 - i / 2:.4f}  grad_norm: 1.2500\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 30, "train_iters": 2046, "lm_loss": 2.0, "sec_per_it": 2.525, "learning_rate": 1.75e-4}
        | {"grad_norm": 1.25, "max_allocated": 15266 * 2**20},
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
    "ms-swift megatron": (
        "".join(
            f"{{'loss': {4.5 - i}, 'grad_norm': 1.25, 'learning_rate': 2e-08, 'load_balancing_loss': 1.25, 'iteration': '{5 * i}/300', 'elapsed_time': '{i}m 30s', 'remaining_time': '23d 14h 27m 6s', 'memory(GiB)': 70.5, 'train_speed(s/it)': 191.5}}\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 15, "train_iters": 300, "lm_loss": 1.5, "learning_rate": 2e-8, "sec_per_it": 12},
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
    "nemo-1 without a total": (
        "".join(
            f"[a-rank-0] [2024-11-01 12:00:0{5 * i % 60},774] [INFO] Epoch 1: : {i}it [00:{5 * i:02d},  4.36s/it, v_num=d3c7, reduced_train_loss={10.5 - i}, global_step={i}.000, consumed_samples={128 * i}.0, samples/sec=14.60]\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "epoch": 1, "lm_loss": 7.5, "sec_per_it": 5},
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
    "nemo-2 of two epochs": (
        "".join(
            f"Training epoch {e}, iteration {i}/9 | lr: 0.0006 | global_batch_size: 32 | global_step: {10 * e + i} | reduced_train_loss: {10.5 - e}\n"
            for e, i in ((0, 9), (1, 0), (1, 1))
        ),
        {"iteration": 11, "epoch": 1, "lm_loss": 9.5, "global_batch_size": 32},
    ),
    "nemo-automodel": (
        "".join(
            f"2024-11-01 12:00:0{3 * i} | INFO | root | step {i} | epoch 0 | loss {2.5 - i / 4:.4f} | grad_norm 1.2500 | lr 1.00e-05 | mem 31.50 GiB | tps 6574.50({821.81:.2f}/gpu) | num_label_tokens 26779\n"
            for i in range(3)
        ),
        {"iteration": 2, "lm_loss": 2.0, "grad_norm": 1.25, "learning_rate": 1e-5, "max_allocated": 31.5 * GIB}
        | {"tokens_per_second": 6574.5, "tokens_per_gpu_per_second": 821.81, "sec_per_it": 3},
    ),
    "olmo": (
        "".join(
            f"[2024-11-01 12:00:{10 * i:02d}] INFO     [olmo.train:816, rank=0] [step={i}/739328]\n    train/CrossEntropyLoss={10.5 - i:.3f}\n    train/Perplexity=1,808\n    throughput/total_tokens={4194304 * i:,d}\n"
            "    throughput/device/tokens_per_second=45,368\n    throughput/device/batches_per_second=0.0865\n    System/Peak GPU Memory (MB)=42,133\n"
            "[2024-11-01 12:00:31] INFO     [olmo.train:900, rank=0] [eval_step=1/4]\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "train_iters": 739328, "lm_loss": 7.5, "consumed_tokens": 12582912, "max_allocated": 42133e6}
        | {"tokens_per_gpu_per_second": 45368, "sec_per_it": 1 / 0.0865},
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
    "paddlenlp": (
        "".join(
            f"[2024-11-01 12:00:0{i},027] [    INFO] - global step {10 * i}, epoch: 0, batch: {10 * i - 1}, loss: {10.5 - i:.9f}, avg_reader_cost: 0.00012 sec, avg_batch_cost: 0.50250 sec, speed: 1.99 steps/s, ips_total: 16302 tokens/s, ips: 2038 tokens/s, learning rate: 2.50000e-05\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 30, "epoch": 0, "lm_loss": 7.5, "sec_per_it": 0.5025, "tokens_per_second": 16302}
        | {"learning_rate": 2.5e-5},
    ),
    "picotron": (
        "".join(
            f"[rank 0] Step: {i:<5d} | Loss: {10.5 - i:6.4f} | Global batch size:   1.05M | Tokens/s:  12.50K | Tokens/s/GPU:   1.56K | Tokens:   {i}.05M/1.00B | MFU: 42.50% | Memory usage:  12.50GB\n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "lm_loss": 7.5, "tokens_per_second": 12500, "tokens_per_gpu_per_second": 1560}
        | {"reserved": 12.5e9},
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
    "torchtune": (
        "".join(
            f"Step {i} | loss:{10.5 - i} lr:2e-05 tokens_per_second_per_gpu:5125.5 grad_norm:2.5 peak_memory_active:24.05 peak_memory_alloc:24.5 peak_memory_reserved:30.5 \n"
            for i in (1, 2, 3)
        ),
        {"iteration": 3, "lm_loss": 7.5, "learning_rate": 2e-5, "tokens_per_gpu_per_second": 5125.5, "grad_norm": 2.5}
        | {"max_allocated": 24.5 * GIB, "max_reserved": 30.5 * GIB},
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
    assert table.fallback or (found == {name} and table.source.startswith("https://github.com/"))


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
