"""What the DeepSpeed engines share: a quiet start, the optimizer that can be built here, parameter groups, a step.

Clipping by the norm of the whole model's gradients, where DeepSpeed clips by less and keeps no norm.
"""

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
from megatron.core import parallel_state

from trilane.config.plan import Plan
from trilane.engine.interface import Step
from trilane.engine.monitor.phases import BACKWARD, FORWARD, OPTIMIZER, REDUCE, during
from trilane.interop.deepspeed_config import deepspeed_config
from trilane.workspace.fingerprints import must_decay

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


class WholeClipping:
    """Takes the place of a DeepSpeed engine's clipping under ZeRO-0 in fp32; `norm` is the last one, before clipping.

    DeepSpeed 0.19.8 clips each pipeline stage by its own norm, which was 1.3e-2 off after 20 iterations. It asks for
    clipping only where the plan has a limit: without one `norm` stays 0.
    """

    def __init__(self, engine: Any, plan: Plan) -> None:
        self.norm = 0.0
        self._module, self._limit = engine.module, plan.optimizer.clip_grad
        engine.clip_fp32_gradients = self

    def __call__(self) -> None:
        """Scale all gradients down together where their norm over all ranks of the model passes the limit."""
        held = [p for p in self._module.parameters() if p.grad is not None]
        counted = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in held if _is_counted(p)]
        squares = torch.stack(counted).square().sum()
        dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        self.norm = squares.sqrt().item()
        # As torch.nn.utils.clip_grad_norm_ does it.
        share = self._limit / (self.norm + 1e-6)
        if share < 1:
            for parameter in held:
                parameter.grad.mul_(share)


def _is_counted(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank counts it: a tied copy and what every tensor-parallel rank holds whole count once."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    cut = getattr(parameter, "tensor_model_parallel", False)
    return cut or parallel_state.get_tensor_model_parallel_rank() == 0
