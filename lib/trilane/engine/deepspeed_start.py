"""What the DeepSpeed engines share: a quiet start, the optimizer that can be built here, parameter groups, a step."""

import contextlib
import io
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from trilane.deepspeed_config import deepspeed_config
from trilane.engine.engines import Step
from trilane.engine.phases import BACKWARD, FORWARD, OPTIMIZER, REDUCE, during
from trilane.fingerprint import must_decay
from trilane.plan import Plan

CONFIG = "ds_config.json"  # in the run folder: what DeepSpeed was given


def start() -> None:
    """DeepSpeed's communication over the process group that stands already; nothing is compiled, nothing said."""
    logger.setLevel("ERROR")
    # Over gloo its pipeline hands activations on by broadcasts into tensors that want gradients; it never asks torch to
    # differentiate them, and the gradients it sends back are right.
    warnings.filterwarnings("ignore", message="c10d::broadcast_: an autograd kernel was not registered")
    if not torch.cuda.is_available():
        # A shared-memory all-reduce that it would build for 20 s, or fail without a C++ compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # It says no, though torch's CPU kernels can: ten times slower than fp32, which is enough for a test.
        get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)


def settings(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's JSON for the plan on these machines, all ranks together; its Adam only where every rank has it."""
    if not torch.cuda.is_available():
        return deepspeed_config(plan, compiler=False)  # seconds for a test are not worth minutes of a compiler
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, _problem(plan))
    lacking = {rank: problem for rank, problem in enumerate(every) if problem}
    if lacking and dist.get_rank() == 0:
        rank, problem = next(iter(lacking.items()))
        print(f"trilane: torch's AdamW, not DeepSpeed's: {len(lacking)} ranks lack it, first {rank}: {problem}")
    return deepspeed_config(plan, compiler=not lacking)


def _problem(plan: Plan) -> str:
    """Why DeepSpeed's Adam for the plan cannot be had here, "" where it can.

    It is built (a minute or two, once, kept in TORCH_EXTENSIONS_DIR), because nothing less tells: a CUDA_HOME without
    nvcc, a compiler too old or not there. With offload that takes a C++ compiler and ninja, without also nvcc.
    """
    name = "FusedAdamBuilder" if plan.topology.offload == "none" else "CPUAdamBuilder"
    try:
        with quiet():
            get_accelerator().create_op_builder(name).load()
    except Exception as error:
        return f"{name}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]:.100}"
    return ""


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """What DeepSpeed prints while it builds is kept off the run's log; its errors are exceptions."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def groups(named: Iterable[tuple[str, torch.nn.Parameter]], decay: float) -> list[dict[str, Any]]:
    """The optimizer's two groups: what decays, and norms and biases; `named` by the names of the whole model."""
    named = list(named)
    return [
        {"params": [p for name, p in named if must_decay(name)], "weight_decay": decay},
        {"params": [p for name, p in named if not must_decay(name)], "weight_decay": 0.0},
    ]


def tell_phases(engine: Any) -> None:
    """Each of the engine's parts is a phase from now on, whoever calls it; the reduction goes on inside backward."""
    for name, phase in {
        "forward": FORWARD,
        "backward": BACKWARD,
        "allreduce_gradients": REDUCE,
        "step": OPTIMIZER,
    }.items():
        setattr(engine, name, during(phase, getattr(engine, name)))


def begin_step(engine: Any, lr: float, microbatches: int) -> None:
    """The rate and the number of microbatches of the next optimizer step, which grows with the batch."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    if microbatches != engine.gradient_accumulation_steps():
        micro, replicas = engine.train_micro_batch_size_per_gpu(), engine.dp_world_size
        engine.set_train_batch_size(microbatches * micro * replicas)


def loss_scale(engine: Any, plan: Plan) -> float:
    """The scale of the next backward pass; 1 but for fp16."""
    return float(engine.optimizer.loss_scale) if plan.topology.precision == "fp16" else 1.0


def step_of(engine: Any, loss: float, scale: float, grad_norm: float | None = None) -> Step:
    """The Step after DeepSpeed's own; `grad_norm` where it keeps none."""
    norm = engine.get_global_grad_norm() if grad_norm is None else grad_norm
    return Step(loss=loss, grad_norm=float(norm or 0.0), loss_scale=scale, skipped=not engine.was_step_applied())
