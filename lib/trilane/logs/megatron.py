"""Megatron's lines: the iteration line and the memory line, as Megatron-LM and its forks print them."""

import re
from collections.abc import Iterable, Iterator

ITERATION = re.compile(r"iteration\s+(\d+)/\s*(\d+) \|(.*)")
MEMORY = re.compile(r"\[Rank (\d+)\] \(after (\d+) iterations\) memory \(MB\) \|(.*)")
FIELD = re.compile(r"\s*([^:|]+?)\s*:\s*([-+.0-9a-zA-Z]+)\s*(?:\||$)")

# Megatron's words -> (column, factor to our unit: seconds, FLOP/s, bytes)
COLUMNS = {
    "consumed samples": ("consumed_samples", 1.0),
    "elapsed time per iteration (ms)": ("sec_per_it", 1e-3),
    "elapsed time per iteration (s)": ("sec_per_it", 1.0),
    "throughput per GPU (TFLOP/s/GPU)": ("flops_per_s_per_gpu", 1e12),
    "learning rate": ("learning_rate", 1.0),
    "global batch size": ("global_batch_size", 1.0),
    "lm loss": ("lm_loss", 1.0),
    "lm-loss": ("lm_loss", 1.0),
    "loss scale": ("loss_scale", 1.0),
    "grad norm": ("grad_norm", 1.0),
    "number of skipped iterations": ("skipped", 1.0),
    "number of nan iterations": ("nan", 1.0),
}


def iteration(line: str) -> dict[str, float] | None:
    """The numbers of an iteration line, in seconds and FLOP/s; None for any other line. Unknown fields are left out."""
    found = ITERATION.search(line)
    if not found:
        return None
    row = {"iteration": float(found[1]), "train_iters": float(found[2])}
    for name, text in FIELD.findall(found[3]):
        if name in COLUMNS:
            column, factor = COLUMNS[name]
            row[column] = float(text) * factor
    return row


def memory(line: str) -> dict[str, float] | None:
    """Rank and bytes of a memory line; None for any other line."""
    found = MEMORY.search(line)
    if not found:
        return None
    values = {name.replace(" ", "_"): float(text) * 2**20 for name, text in FIELD.findall(found[3])}
    return {"rank": float(found[1]), "iteration": float(found[2]), **values}


def rows(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """("iteration" | "memory", numbers) of every line that says something."""
    for line in lines:
        if step := iteration(line):
            yield "iteration", step
        elif held := memory(line):
            yield "memory", held
