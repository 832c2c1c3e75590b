"""What the DeepSpeed engines share: start, settings, parameter groups, the step, clipping by the whole norm."""

import contextlib
import functools
import io
import os
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

CONFIG = "ds_config.json"  # in the run folder: the settings that DeepSpeed received


def start() -> None:
    """Initialize DeepSpeed's communication over the existing process group, without compiling or printing anything."""
    logger.setLevel("ERROR")
    # Over gloo its pipeline passes activations on by broadcasts into tensors that require gradients; torch never
    # differentiates these broadcasts, and the gradients that DeepSpeed sends back are right.
    warnings.filterwarnings("ignore", message="c10d::broadcast_: an autograd kernel was not registered")
    if not torch.cuda.is_available():
        # A shared-memory all-reduce, which takes 20 s to build and fails without a C++ compiler.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # DeepSpeed reports False, though torch's CPU kernels support it: ten times slower than fp32, enough for a test.
        get_accelerator().is_fp16_supported = lambda: True
        # It starts a process to count NUMA nodes; ZeRO 3 asks for each gradient.
        get_accelerator().device_count = functools.cache(get_accelerator().device_count)
    else:  # its engines take LOCAL_RANK for the number of the card, which is 0 where a task sees one card alone
        os.environ["LOCAL_RANK"] = str(torch.cuda.current_device())
    deepspeed.init_distributed(dist_backend=dist.get_backend(), dist_init_required=False)


def settings(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's JSON for the plan on these hosts, with its Adam only where every rank can build it. Collective."""
    if not torch.cuda.is_available():
        return deepspeed_config(plan, compiler=False)  # a test of seconds does not justify minutes of compiling
    every: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(every, _adam_build_error(plan))
    lacking = {rank: problem for rank, problem in enumerate(every) if problem}
    if lacking and dist.get_rank() == 0:
        rank, problem = next(iter(lacking.items()))
        print(f"trilane: using torch's AdamW: {len(lacking)} ranks cannot build DeepSpeed's, first {rank}: {problem}")
    return deepspeed_config(plan, compiler=not lacking)


def _adam_build_error(plan: Plan) -> str:
    """Why DeepSpeed's Adam for the plan cannot be built here, "" where it can.

    Only building it (a minute or two, once, kept in TORCH_EXTENSIONS_DIR) reveals a CUDA_HOME without nvcc, or a
    compiler that is too old or missing. With offload it needs a C++ compiler and ninja; without, also nvcc.
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
    """Suppress what DeepSpeed prints while it builds; its errors are exceptions."""
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def groups(named: Iterable[tuple[str, torch.nn.Parameter]], decay: float) -> list[dict[str, Any]]:
    """The optimizer's two groups: with weight decay, and without (norms, biases); `named` by whole-model names."""
    named = list(named)
    return [
        {"params": [p for name, p in named if must_decay(name)], "weight_decay": decay},
        {"params": [p for name, p in named if not must_decay(name)], "weight_decay": 0.0},
    ]


def mark_phases(engine: Any) -> None:
    """Make each of the engine's methods a phase from now on; ZeRO 2 and 3 also reduce inside backward."""
    for name, phase in {
        "forward": FORWARD,
        "backward": BACKWARD,
        "allreduce_gradients": REDUCE,
        "step": OPTIMIZER,
    }.items():
        setattr(engine, name, during(phase, getattr(engine, name)))


def begin_step(engine: Any, lr: float, microbatches: int) -> None:
    """Set the learning rate and the number of microbatches of the next step; the latter grows with the batch."""
    for group in engine.optimizer.param_groups:
        group["lr"] = lr
    if microbatches != engine.gradient_accumulation_steps():
        micro, replicas = engine.train_micro_batch_size_per_gpu(), engine.dp_world_size
        engine.set_train_batch_size(microbatches * micro * replicas)


def loss_scale(engine: Any, plan: Plan) -> float:
    """The loss scale of the next backward pass; 1 except in fp16."""
    return float(engine.optimizer.loss_scale) if plan.topology.precision == "fp16" else 1.0


def step_of(engine: Any, loss: float, scale: float, grad_norm: float | None = None) -> Step:
    """The result of DeepSpeed's step; `grad_norm` where DeepSpeed keeps none."""
    norm = engine.get_global_grad_norm() if grad_norm is None else grad_norm
    return Step(loss=loss, grad_norm=float(norm or 0.0), loss_scale=scale, skipped=not engine.was_step_applied())


class WholeClipping:
    """Replaces a DeepSpeed engine's clipping under ZeRO-0 in fp32; `norm` is the last gradient norm, before clipping.

    DeepSpeed 0.19.8 clips each pipeline stage by its own norm: losses differed by 1.3e-2 after 20 iterations. It calls
    the clipping only where the plan has a limit: without one `norm` stays 0.
    """

    def __init__(self, engine: Any, plan: Plan) -> None:
        self.norm = 0.0
        self._module, self._limit = engine.module, plan.optimizer.clip_grad
        engine.clip_fp32_gradients = self

    def __call__(self) -> None:
        """Scale all gradients down by one factor where their norm over all ranks of the model exceeds the limit."""
        held = [p for p in self._module.parameters() if p.grad is not None]
        counted = [torch.linalg.vector_norm(p.grad, dtype=torch.float32) for p in held if _is_counted(p)]
        squares = torch.stack(counted).square().sum()
        dist.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        self.norm = squares.sqrt().item()
        # As torch.nn.utils.clip_grad_norm_ does.
        share = self._limit / (self.norm + 1e-6)
        if share < 1:
            for parameter in held:
                parameter.grad.mul_(share)


def _is_counted(parameter: torch.nn.Parameter) -> bool:
    """Whether this rank counts it: a tied copy, and what every tensor-parallel rank holds whole, count once."""
    if getattr(parameter, "ds_pipe_replicated", False):
        return False
    cut = getattr(parameter, "tensor_model_parallel", False)
    return cut or parallel_state.get_tensor_model_parallel_rank() == 0


def sum_shared_gradients(parameters: Iterable[torch.nn.Parameter]) -> None:
    """Sum over tensor-parallel ranks the gradients of parameters held whole but applied to a part of the sequence.

    megatron-core marks those parameters and sums once an iteration, in finalize_model_grads. DeepSpeed does neither and
    puts a gradient into its buckets as soon as it exists, so a hook sums it before, once a microbatch.
    """
    for parameter in parameters:
        if getattr(parameter, "sequence_parallel", False):
            parameter.register_hook(_sum_over_tensor_parallel)


def _sum_over_tensor_parallel(gradient: torch.Tensor) -> torch.Tensor:
    whole = gradient.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(whole, group=parallel_state.get_tensor_model_parallel_group())
    return whole
