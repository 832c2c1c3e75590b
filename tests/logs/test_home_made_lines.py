"""Lines that no known trainer prints, made at random: what is read of them is what they hold, or is marked, or refused."""

import json
import random
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from trilane.logs.run import NoIterations, read_logs

STEPS = [
    "step",
    "Step",
    "iter",
    "Iteration",
    "global_step",
    "train_step",
    "trainer/global_step",
    "update",
    "it",
    "batch",
]
LOSSES = [
    "loss",
    "Loss",
    "train_loss",
    "train loss",
    "lm_loss",
    "nll",
    "total_loss",
    "avg_loss",
    "loss/train",
    "loss_ema",
]
OTHERS = {
    **{"lr": "3.00e-04", "grad_norm": "1.234", "aux_loss": "0.0123", "best loss": "2.91", "avg loss": "3.31"},
    **{"kl loss": "0.12", "val_loss": "3.4567", "best_val_loss": "3.1", "loss_scale": "65536", "loss_val": "3.8"},
    **{"test/loss": "3.9", "inner step": "3", "local_step": "55", "max_steps": "100000", "step_in_epoch": "17"},
    **{"ppl": "20.1", "mem": "31.2GB", "elapsed": "1:02:03", "eta": "12:33:10", "epoch": "0", "tok/s": "41000"},
}
# how it prints a time of so many seconds, and whether that is an iteration's
TIMES: dict[str, tuple[Callable[[float], str], bool]] = {
    "dt": (lambda s: f"{1000 * s:.2f}ms", True),
    "step_time": (lambda s: f"{s:.3f}s", True),
    "ms/step": (lambda s: f"{1000 * s:.1f}", True),
    "fwd": (lambda s: f"{500 * s:.1f}ms", False),
    "data_time": (lambda s: f"{s / 9:.4f}", False),
}
EVALUATIONS = ["eval step {n}: val_loss {v}", "[eval] step={n} loss={v}", "step {n}: train loss {l}, val loss {v}"]
ROWS = 12


def write(seed: int) -> tuple[str, dict[int, float], float | None]:
    """A log, the loss of its iterations, and the seconds of one where it prints them."""
    pick = random.Random(seed)
    step, loss, every, seconds = map(pick.choice, (STEPS, LOSSES, [1, 10], [0.53, 12.4]))
    start, timer = pick.choice([1, 1000]), pick.choice([None, *TIMES])
    layout, assign, join = map(pick.choice, (["text", "json", "dict"], ["=", ": ", " "], [" | ", ", ", " "]))
    stamped, prefix = pick.random() < 0.3, pick.choice(["", "[rank0]: ", "[INFO] "])
    evaluation = pick.choice([None, *EVALUATIONS])
    others = pick.sample([name for name in OTHERS if name != loss], pick.randint(0, 5))
    names = [step, loss, *others, *filter(None, [timer])]
    pick.shuffle(names)
    lines, losses = [], dict[int, float]()
    for n in range(start, start + ROWS * every, every):
        losses[n] = round(10 - n / 1e4 - pick.random() / 10, 4)
        values = OTHERS | {step: str(n), loss: str(losses[n])}
        values |= {timer: TIMES[timer][0](seconds)} if timer else {}
        shown = {name: values[name] for name in names}
        as_text = {
            "json": json.dumps(shown),
            "dict": str(shown),
            "text": join.join(f"{k}{assign}{v}" for k, v in shown.items()),
        }
        when = datetime.fromtimestamp(1.7e9 + (n - start) * seconds, UTC)
        lines.append(f"{when:%Y-%m-%d %H:%M:%S} " * stamped + prefix + as_text[layout])
        lines += [evaluation.format(n=n, l=losses[n], v=9.5)] if evaluation and n % 4 == 0 else []
    return "\n".join(lines) + "\n", losses, seconds if stamped or (timer and TIMES[timer][1]) else None


def test_what_is_read_of_home_made_lines_is_what_they_hold_or_is_marked(tmp_path):
    read = 0
    for seed in range(400):
        text, losses, seconds = write(seed)
        (tmp_path / "a.log").write_text(text)
        try:
            runs = read_logs(tmp_path / "a.log")
        except NoIterations:
            continue
        if any(run.problems for run in runs):
            continue
        (run,) = runs
        found = dict(zip(run.column("iteration"), run.column("lm_loss"), strict=True))
        assert found == {n: losses[n] for n in found} and len(losses) <= 2 * len(found) + 1, text
        printed = run.column("sec_per_it")
        assert seconds or not (printed == printed).any(), text
        assert printed[printed == printed] == pytest.approx(seconds, rel=0.1) if seconds else True, text
        read += 1
    assert read > 100  # most names of a loss above mean something else, or nothing certain
