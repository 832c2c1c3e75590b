"""What a stack waits for: the collective, the line that called it, and the group axis that it runs over."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from trilane.diagnose.hang.stack import Frame

# Functions between the caller and the collective, without information.
WRAPPERS = {"wrapper", "inner", "_fn", "decorate_context", "inner_wrapper", "log_wrapper", "wrapped_fn", "__call__",
            "__exit__", "__enter__"}  # fmt: skip

COLLECTIVES = {
    "all_reduce", "all_reduce_coalesced", "broadcast", "broadcast_object_list", "barrier", "monitored_barrier",
    "reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "_all_gather_base", "gather",
    "gather_object", "scatter", "scatter_object_list", "reduce_scatter", "reduce_scatter_tensor",
    "_reduce_scatter_base", "all_to_all", "all_to_all_single", "send", "recv", "isend", "irecv", "send_object_list",
    "recv_object_list", "batch_isend_irecv", "new_group", "init_process_group", "_store_based_barrier", "rendezvous",
    "destroy_process_group", "allgather_fn", "reduce_scatter_fn", "inference_all_reduce",
}  # fmt: skip

# Files whose functions only communicate; a rank in one of them waits for others.
LIBRARIES = re.compile(
    r"distributed/distributed_c10d\.py|distributed/c10d_logger\.py|distributed/_functional_collectives\.py"
    r"|distributed/rendezvous\.py|distributed/elastic/utils/store\.py|deepspeed/comm/\w+\.py|^comm/\w+\.py"
    r"|pipe/p2p\.py|pipeline_parallel/p2p_communication\.py|megatron/p2p_communication\.py|^p2p_communication\.py"
    r"|nccl\.py$|distributed_c10d\.py$"
)

# Waits for the GPU: for everything queued on it, collectives included.
DEVICE = re.compile(r"(?:cuda/(?:__init__|streams|_utils)\.py|accelerator/.*\.py|cuda_accelerator\.py)$")
DEVICE_WAITS = {"synchronize", "wait", "wait_stream", "wait_event", "current_stream", "query", "_sync", "elapsed_time"}

# The group axis by names of functions and files, innermost first. Groups of several axes come before those of one.
# Taken from megatron-core 0.16, Megatron-DeepSpeed and DeepSpeed 0.19.
HINTS = [
    ("embedding", r"embedding_grads|embedding_grad_sync|allreduce_word_embedding|position_embedding_grads|reduce_tied"),
    ("previous", r"recv_forward|recv_activations|RecvActivation|send_backward|send_grads|SendGrad"),
    ("next", r"recv_backward|recv_grads|RecvGrad|send_forward|send_activations|SendActivation"),
    ("model", r"grad_norm|clip_grad|found_inf|check_for_nan|has_overflow|check_overflow|_has_inf|unscale|count_zeros"),
    ("pp", r"_aggregate_total_loss|_bcast_pipe|p2p_communication|pipe/p2p|pipe/engine\.py.*bcast"),
    ("tp", r"layernorm_grads|non_tensor_model_parallel|tensor_parallel|mappings\.py|vocab_parallel|sequence_parallel"
           r"|RowParallel|ColumnParallel|cross_entropy|model_parallel_region|broadcast_data"),
    ("dp", r"data_parallel|allreduce_gradients|allreduce_bucket|distributed/finalize_model_grads|param_and_grad_buffer"
           r"|zero/|stage_1_and_2|stage3|partition_parameters|partitioned_param|distrib_optimizer|grad_sync|param_sync"
           r"|reduce_grads|average_losses|fsdp|buffered_allreduce|allreduce_no_retain|dp_process_group"
           r"|^_mean .*engine/(?:backends/)?megatron"),
    ("world", r"checkpoint|\bbarrier|initialize|init_process_group|new_group|rendezvous|timers|exit|print_rank"
              r"|shutdown|destroy_process|broadcast_object_list|shared_prefix|build_train_valid|engine/(?:stop_)?requests\.py"),
]  # fmt: skip

CALLERS = 4  # frames that show what a collective is for; further out is the training loop

ALL_RANKS = {"barrier", "monitored_barrier", "new_group", "init_process_group", "_store_based_barrier", "rendezvous",
             "destroy_process_group"}  # fmt: skip

PATTERNS = [(axis, re.compile(pattern)) for axis, pattern in HINTS]


@dataclass(frozen=True, kw_only=True)
class Wait:
    """A wait in `op`, called by `site`; `axis` is the group axis by names in the stack, "" where they do not show it.

    `op` "device" is a wait for the GPU, whose queue holds some collective that the stack does not show.
    """

    op: str
    site: Frame
    axis: str

    def __str__(self) -> str:
        return f"{self.op}, called by {self.site}"

    @property
    def p2p(self) -> bool:
        """Whether it waits for one neighbour."""
        return self.axis in ("next", "previous") or self.op in ("send", "recv", "isend", "irecv", "batch_isend_irecv")


def wait_of(frames: Sequence[Frame]) -> Wait | None:
    """What a stack (innermost frame first) waits for; None where its innermost frame does not communicate."""
    inner = next((i for i, f in enumerate(frames) if f.function not in WRAPPERS or _communicates(f)), len(frames))
    if inner == len(frames):
        return None
    at = frames[inner]
    if DEVICE.search(at.file) and at.function in DEVICE_WAITS:
        above = [f for f in frames[inner:] if not DEVICE.search(f.file) and f.function not in WRAPPERS]
        return Wait(op="device", site=above[0] if above else at, axis=_axis(above[:1]))
    if not _communicates(at):
        return None
    last = inner
    while last + 1 < len(frames) and (_communicates(frames[last + 1]) or frames[last + 1].function in WRAPPERS):
        last += 1
    callers = list(frames[last + 1 :])
    ops = [f.function for f in frames[inner : last + 1] if f.function in COLLECTIVES]
    op = ops[0] if ops else at.function
    axis = _direction(frames[inner : last + 1]) or _axis(callers[:CALLERS]) or ("world" if op in ALL_RANKS else "")
    return Wait(op=op, site=callers[0] if callers else at, axis=axis)


def _direction(frames: Sequence[Frame]) -> str:
    """The neighbour stage ("next", "previous") of pipeline communication; "pp" where unknown, "" for other frames."""
    names = [f.function for f in frames if "p2p" in f.file]
    axis = next((axis for name in names for axis, pattern in PATTERNS[1:3] if pattern.search(name)), "")
    return axis or ("pp" if names else "")


def soft_wait(frames: Sequence[Frame]) -> Wait | None:
    """The wait of a stack whose innermost frame communicates, but is not in a collective; None for other stacks.

    `handle.wait()`, `.item()` and a launch on a full queue are C++: the innermost Python line is the caller's.
    """
    axis = _axis(frames[:1])
    return Wait(op="wait", site=frames[0], axis=axis) if axis else None


def _communicates(frame: Frame) -> bool:
    return bool(LIBRARIES.search(frame.file)) or (frame.function in COLLECTIVES and "distributed" in frame.file)


def _axis(frames: Sequence[Frame]) -> str:
    """The first hint from the innermost frame outwards."""
    names = (f"{frame.function} {frame.file}" for frame in frames)
    return next((axis for name in names for axis, pattern in PATTERNS if pattern.search(name)), "")
