"""Logs of trainings that restart, as text: a course of plain numbers, printed in several dialects."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PEAK, VOCABULARY = 3e-4, 50304
Row = dict[str, float]


def cosine(total: int, warmup: int = 40, peak: float = PEAK, low: float = PEAK / 10) -> Callable[[float], float]:
    return lambda i: (
        peak * i / warmup
        if i <= warmup
        else low + (peak - low) * (1 + math.cos(math.pi * min(1.0, (i - warmup) / (total - warmup)))) / 2
    )


def linear(total: int, warmup: int = 40, peak: float = PEAK) -> Callable[[float], float]:
    return lambda i: peak * min(i / warmup, (total - i) / (total - warmup))


def wsd(total: int, decay: int, warmup: int = 40, peak: float = PEAK) -> Callable[[float], float]:
    return lambda i: peak * min(1.0, i / warmup, max(0.0, (total - i) / decay))


def inverse_sqrt(warmup: int = 40, peak: float = PEAK) -> Callable[[float], float]:
    return lambda i: peak * min(i / warmup, math.sqrt(warmup / i))


def constant(peak: float = PEAK) -> Callable[[float], float]:
    return lambda i: peak


def loss_of(i: float) -> float:
    """Falls from ln(vocabulary) by a power of the iteration."""
    return 2.2 + (math.log(VOCABULARY) - 2.2) * (1 + i / 30) ** -0.45


@dataclass(frozen=True, kw_only=True)
class Training:
    """The course of a training; a fault replaces one of its functions for the rows after the restart."""

    total: int = 1000
    rate: Callable[[float], float] = field(default_factory=lambda: cosine(1000))
    batch: Callable[[float], float] = lambda i: 64.0
    loss: Callable[[float], float] = loss_of
    norm: Callable[[float], float] = lambda i: 0.4 + 3 * (1 + i) ** -0.7
    scale: Callable[[float], float] = lambda i: 65536.0 * 2.0 ** -min(4, i // 60)
    seconds: float = 2.0
    seq_length: Callable[[float], float] = lambda i: 2048.0
    samples: float = 0.0  # more than the iterations consume
    noise: float = 0.01

    def rows(self, first: int, last: int, step: int = 1, run: int = 0) -> list[Row]:
        """The iterations `first` to `last`, every `step`-th; the data, and so its noise, is that of the iteration."""
        found, consumed, tokens = list[Row](), self.samples, self.samples * self.seq_length(1)
        for i in range(1, last + 1):
            consumed, tokens = consumed + self.batch(i), tokens + self.batch(i) * self.seq_length(i)
            if i < first or i % step:
                continue
            data, clock = (
                np.random.default_rng(i).standard_normal(2),
                np.random.default_rng([i, run]).standard_normal(3),
            )
            found.append(
                {
                    "iteration": i,
                    "consumed_samples": consumed,
                    "consumed_tokens": tokens,
                    "learning_rate": self.rate(i),
                    "global_batch_size": self.batch(i),
                    "lm_loss": self.loss(i) * math.exp(self.noise * data[0] + 0.0003 * clock[0]),
                    "grad_norm": self.norm(i) * math.exp(0.12 * data[1] + 0.01 * clock[1]),
                    "loss_scale": self.scale(i),
                    "seq_length": self.seq_length(i),
                    "sec_per_it": self.seconds * math.exp(0.02 * abs(clock[2])) * (3 if i == first else 1),
                    "total": self.total,
                }
            )
        return found


def megatron(r: Row) -> str:
    return (
        f" [2026-01-02 03:04:05.000000] iteration {r['iteration']:8d}/{r['total']:8d} | consumed samples: "
        f"{r['consumed_samples']:12.0f} | elapsed time per iteration (ms): {1e3 * r['sec_per_it']:.1f} | throughput "
        f"per GPU (TFLOP/s/GPU): 150.0 | learning rate: {r['learning_rate']:.6E} | global batch size: "
        f"{r['global_batch_size']:5.0f} | lm loss: {r['lm_loss']:.6E} | loss scale: {r['loss_scale']:.1f} | grad norm: "
        f"{r['grad_norm']:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def megatron_deepspeed(r: Row) -> str:
    return (
        f"[default7]: iteration {r['iteration']:8d}/{r['total']:8d} | consumed samples: {r['consumed_samples']:12.0f} "
        f"| consumed tokens: {r['consumed_tokens']:12.0f} | elapsed time per iteration (s): {r['sec_per_it']:.2f} | "
        f"learning rate: {r['learning_rate']:.3E} | global batch size: {r['global_batch_size']:5.0f} | lm loss: "
        f"{r['lm_loss']:.6E} | grad norm: {r['grad_norm']:.3f} | num zeros: 0.0 | number of skipped iterations:   0 | "
        f"number of nan iterations:   0 | samples per second: {r['global_batch_size'] / r['sec_per_it']:.3f} | "
        "TFLOPs: 107.48 |\n"
    )


def neox(r: Row) -> str:
    return (
        f" samples/sec: {r['global_batch_size'] / r['sec_per_it']:.3f} | iteration {r['iteration']:8d}/{r['total']:8d} "
        f"| elapsed time per iteration (ms): {1e3 * r['sec_per_it']:.1f} | learning rate: {r['learning_rate']:.3E} | "
        f"approx flops per GPU: 57.6TFLOPS | lm_loss: {r['lm_loss']:.6E} | loss scale: {r['loss_scale']:.1f} | number "
        "of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def trainer(r: Row) -> str:
    return (
        f" {100 * r['iteration'] // r['total']}%|#   | {r['iteration']:.0f}/{r['total']:.0f} [00:10<03:10]"
        f"{{'loss': {r['lm_loss']:.4f}, 'grad_norm': {r['grad_norm']:.6f}, 'learning_rate': {r['learning_rate']}, "
        f"'epoch': {r['iteration'] / r['total']:.2f}}}\n"
    )


def titan(r: Row) -> str:
    tps = r["global_batch_size"] * r["seq_length"] / r["sec_per_it"] / 8
    return (
        f"[rank0]:2026-01-02 03:04:05 - root - INFO - step: {r['iteration']:2d}  loss: {r['lm_loss']:7.4f}  grad_norm: "
        f"{r['grad_norm']:7.4f}  memory: 38.50GiB(40.53%)  tps: {tps:,.0f}  tflops: 312.50  mfu: 31.60%\n"
    )


DIALECTS = {
    "megatron": megatron,
    "megatron-deepspeed": megatron_deepspeed,
    "neox": neox,
    "trainer": trainer,
    "torchtitan": titan,
}


def text(rows: Iterable[Row], dialect: str = "megatron", arguments: dict[str, Any] | None = None) -> str:
    """The log of those rows, after Megatron's dump of the arguments."""
    dump = "".join(f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in (arguments or {}).items())
    dump = f"------------------------ arguments ------------------------\n{dump}" if dump else ""
    return dump + "".join(map(DIALECTS[dialect], rows))


def written(folder: Any, parts: Sequence[str]) -> list[str]:
    """Files of those logs, 1.log, 2.log, ..."""
    names = [str(folder / f"{number}.log") for number in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        with open(name, "w") as file:
            file.write(part)
    return names
