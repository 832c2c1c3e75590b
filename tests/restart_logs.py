"""Logs of trainings that restart, in Megatron's form: a course of plain numbers."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trilane.config.training import Optimizer

PEAK, VOCABULARY = 3e-4, 50304
Row = dict[str, float]


def rate(total: int, warmup: int = 40, **schedule: Any) -> Callable[[int], float]:
    """A linear warm-up to PEAK, and a decay down to a tenth of it."""
    optimizer = Optimizer(lr=PEAK, min_lr=PEAK / 10, warmup_samples=warmup, **schedule)
    return lambda i: optimizer.learning_rate(i, total)


SCHEDULE = rate(1000)


def loss_of(i: float) -> float:
    """Falls from ln(vocabulary) by a power of the iteration."""
    return 2.2 + (math.log(VOCABULARY) - 2.2) * (1 + i / 30) ** -0.45


@dataclass(frozen=True, kw_only=True)
class Training:
    """The course of a training; a fault replaces one of its functions for the rows after the
    restart.
    """

    total: int = 1000
    rate: Callable[[int], float] = SCHEDULE
    batch: Callable[[float], float] = lambda i: 64.0
    loss: Callable[[float], float] = loss_of
    samples: float = 0.0  # more than the iterations consume
    noise: float = 0.01

    def rows(self, first: int, last: int, step: int = 1, run: int = 0) -> list[Row]:
        """The iterations `first` to `last`, every `step`-th; the data, and so its noise, is that of
        the iteration.
        """
        rows = []
        consumed = self.samples
        for i in range(1, last + 1):
            consumed += self.batch(i)
            if i < first or i % step:
                continue
            data = np.random.default_rng(i).standard_normal()
            rounding = np.random.default_rng([i, run]).standard_normal()
            row = {
                "iteration": i,
                "total": self.total,
                "consumed_samples": consumed,
                "learning_rate": self.rate(i),
                "global_batch_size": self.batch(i),
                "lm_loss": self.loss(i) * math.exp(self.noise * data + 0.0003 * rounding),
            }
            rows.append(row)
        return rows


def line(r: Row) -> str:
    """The line of an iteration in the log."""
    return (
        f" [2026-01-02 03:04:05.000000] iteration {r['iteration']:8d}/{r['total']:8d} | consumed "
        f"samples: {r['consumed_samples']:12.0f} | elapsed time per iteration (ms): 2000.0 | "
        f"learning rate: {r['learning_rate']:.6E} | "
        f"global batch size: {r['global_batch_size']:5.0f} | lm loss: {r['lm_loss']:.6E} | number "
        "of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )


def text(rows: Iterable[Row], arguments: dict[str, Any] | None = None) -> str:
    """The log of those rows, after Megatron's dump of the arguments."""
    dump = ""
    if arguments:
        dump = "------------------------ arguments ------------------------\n"
    for name, value in (arguments or {}).items():
        dump += f"  {name} {'.' * (48 - len(name))} {value}\n"
    return dump + "".join(map(line, rows))


def written(folder: Any, parts: Sequence[str]) -> list[str]:
    """Files of those logs, 1.log, 2.log, ..."""
    names = []
    for number, part in enumerate(parts, 1):
        name = folder / f"{number}.log"
        name.write_text(part)
        names.append(str(name))
    return names
