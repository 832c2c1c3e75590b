"""Logs of trainings that restart, as text: a course of plain numbers, printed in
several dialects.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PEAK, VOCABULARY = 3e-4, 50304
Row = dict[str, float]


def cosine(
    total: int, warmup: int = 40, peak: float = PEAK, low: float = PEAK / 10
) -> Callable[[float], float]:
    return lambda i: (
        peak * i / warmup
        if i <= warmup
        else low
        + (peak - low) * (1 + math.cos(math.pi * min(1.0, (i - warmup) / (total - warmup)))) / 2
    )


def wsd(total: int, decay: int, warmup: int = 40, peak: float = PEAK) -> Callable[[float], float]:
    return lambda i: peak * min(1.0, i / warmup, max(0.0, (total - i) / decay))


def constant(peak: float = PEAK) -> Callable[[float], float]:
    return lambda i: peak


def loss_of(i: float) -> float:
    """Falls from ln(vocabulary) by a power of the iteration."""
    return 2.2 + (math.log(VOCABULARY) - 2.2) * (1 + i / 30) ** -0.45


@dataclass(frozen=True, kw_only=True)
class Training:
    """The course of a training; a fault replaces one of its functions for the rows after the
    restart.
    """

    total: int = 1000
    rate: Callable[[float], float] = field(default_factory=lambda: cosine(1000))
    batch: Callable[[float], float] = lambda i: 64.0
    loss: Callable[[float], float] = loss_of
    norm: Callable[[float], float] = lambda i: 0.4 + 3 * (1 + i) ** -0.7
    scale: Callable[[float], float] = lambda i: 65536.0 * 2.0 ** -min(4, i // 60)
    seconds: float = 2.0
    samples: float = 0.0  # more than the iterations consume
    noise: float = 0.01

    def rows(self, first: int, last: int, step: int = 1, run: int = 0) -> list[Row]:
        """The iterations `first` to `last`, every `step`-th; the data, and so its noise, is that of
        the iteration.
        """
        found, consumed = list[Row](), self.samples
        for i in range(1, last + 1):
            consumed += self.batch(i)
            if i < first or i % step:
                continue
            data = np.random.default_rng(i).standard_normal(2)
            clock = np.random.default_rng([i, run]).standard_normal(3)
            slow = 3 if i == first else 1
            row = {
                "iteration": i,
                "total": self.total,
                "consumed_samples": consumed,
                "learning_rate": self.rate(i),
                "global_batch_size": self.batch(i),
                "loss_scale": self.scale(i),
                "lm_loss": self.loss(i) * math.exp(self.noise * data[0] + 0.0003 * clock[0]),
                "grad_norm": self.norm(i) * math.exp(0.12 * data[1] + 0.01 * clock[1]),
                "sec_per_it": self.seconds * math.exp(0.02 * abs(clock[2])) * slow,
            }
            found.append(row)
        return found


def megatron(r: Row) -> str:
    return (
        f" [2026-01-02 03:04:05.000000] iteration {r['iteration']:8d}/{r['total']:8d} | consumed samples: "
        f"{r['consumed_samples']:12.0f} | elapsed time per iteration (ms): {1e3 * r['sec_per_it']:.1f} | throughput "
        f"per GPU (TFLOP/s/GPU): 150.0 | learning rate: {r['learning_rate']:.6E} | global batch size: "
        f"{r['global_batch_size']:5.0f} | lm loss: {r['lm_loss']:.6E} | loss scale: {r['loss_scale']:.1f} | grad norm: "
        f"{r['grad_norm']:.3f} | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def trainer(r: Row) -> str:
    return (
        f" {100 * r['iteration'] // r['total']}%|#   | {r['iteration']:.0f}/{r['total']:.0f} [00:10<03:10]"
        f"{{'loss': {r['lm_loss']:.4f}, 'grad_norm': {r['grad_norm']:.6f}, 'learning_rate': {r['learning_rate']}, "
        f"'epoch': {r['iteration'] / r['total']:.2f}}}\n"
    )


DIALECTS = {"megatron": megatron, "trainer": trainer}


def text(
    rows: Iterable[Row], dialect: str = "megatron", arguments: dict[str, Any] | None = None
) -> str:
    """The log of those rows, after Megatron's dump of the arguments."""
    dump = "".join(
        f"  {name} {'.' * (48 - len(name))} {value}\n" for name, value in (arguments or {}).items()
    )
    dump = f"------------------------ arguments ------------------------\n{dump}" if dump else ""
    return dump + "".join(map(DIALECTS[dialect], rows))


def written(folder: Any, parts: Sequence[str]) -> list[str]:
    """Files of those logs, 1.log, 2.log, ..."""
    names = [str(folder / f"{number}.log") for number in range(1, len(parts) + 1)]
    for name, part in zip(names, parts, strict=True):
        with open(name, "w") as file:
            file.write(part)
    return names
