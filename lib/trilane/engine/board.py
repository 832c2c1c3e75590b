"""TensorBoard's event file of a run, in its folder `tensorboard/`."""

from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from trilane.engine.report import Iteration

# What it is called there, by Megatron-LM's names where it has one; seconds, and TFLOP/s per GPU.
SCALARS = {
    "lm loss": "lm_loss",
    "learning-rate": "learning_rate",
    "grad-norm": "grad_norm",
    "loss-scale": "loss_scale",
    "batch-size": "global_batch_size",
    "consumed-samples": "consumed_samples",
    "iteration-time": "sec_per_it",
    "throughput": "tflops",
}


class Board:
    """Takes iterations; what it took can be seen after each log interval."""

    def __init__(self, folder: Path) -> None:
        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def add(self, step: Iteration) -> None:
        """All scalars of one iteration."""
        for name, field in SCALARS.items():
            self._writer.add_scalar(name, getattr(step, field), step.iteration)

    def flush(self) -> None:
        """Everything added so far is in the file."""
        self._writer.flush()
