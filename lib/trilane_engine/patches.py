"""Private names of torch 2.13, megatron-core 0.16.1 to 0.19.2, DeepSpeed 0.19.8, transformers 5.23.

All that the engine uses, but for those of `cpu`, into which 'cuda' is written. Of each the library
has no public way; tests/engine/test_patches.py fails where it changes what is used or mended here.
"""

import contextlib
import functools
import importlib
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses import fake_tensor as fake_tensor
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only


def put(place: Any, **attributes: Any) -> None:
    """Set attributes of a module or class."""
    for name, value in attributes.items():
        setattr(place, name, value)


def join_fake_group(rank: int, size: int) -> None:
    """torch's process group "fake": one rank of `size`, whose messages go nowhere."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """The tensors in a tree of values."""
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def storage_key(tensor: torch.Tensor) -> int:
    """What tells a storage from others that are alive, also where it has no memory."""
    return tensor.untyped_storage()._cdata


def stored_at(file: str, first: int, size: int) -> Any:
    """Where a checkpoint of torch.distributed has a value, by the class that it pickles."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, first, size)


def after_start(api: Any, then: Callable[[Any], None]) -> None:
    """Call `then` with all workers that torchrun's module `api` has started at once."""
    start = api.SubprocessContext._start

    def started(workers: Any) -> None:
        start(workers)
        then(workers)

    api.SubprocessContext._start = started


def listen_on_loopback(rendezvous: Any) -> None:
    """Let the store of torchrun's module listen there alone where that is its address."""
    store = rendezvous.TCPStore

    def bound(host: str, port: int, size: int, hosts: bool, wait: Any, **options: Any) -> Any:
        if hosts and host == "127.0.0.1":
            listening = socket.create_server((host, port))
            options["master_listen_fd"] = listening.detach()  # the store closes it
        return store(host, port, size, hosts, wait, **options)

    rendezvous.TCPStore = bound


def without_values() -> None:
    """In a trace: torch and megatron-core read no values, swap no tensors."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.tensor_parallel import random

    nothing = lambda *_, **__: None  # noqa: E731
    state = torch.empty(0, dtype=torch.uint8)
    for place in (torch, torch.random, torch.cuda, torch.cuda.random):
        put(place, get_rng_state=lambda device=None: state, set_rng_state=nothing)
    for place in (dist, dist.distributed_c10d):
        put(place, all_gather_object=_copies, broadcast_object_list=nothing)
    put(random, _set_cuda_rng_state=nothing)
    # what it makes of reduce-scatters has no fake kernel: they are done one by one, at once
    at_once = contextlib.nullcontext(SimpleNamespace(wait=bool))
    put(param_and_grad_buffer, _coalescing_manager=lambda *_, **__: at_once)
    put(torch.nn.Module, _apply=_apply)
    put(torch.Tensor, numpy=lambda self, **_: np.zeros(self.shape))
    put(torch, tensor=_stacking(torch.tensor))


def balance(experts: int, top_k: int) -> None:
    """In a trace: as many tokens for each expert, so that every size is known."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    def preprocess(self: Any, routing_map: torch.Tensor) -> np.ndarray:
        copies = len(routing_map) * top_k
        ranks = self.tp_size * self.ep_size
        self.num_out_tokens = copies
        self.input_splits = self.output_splits = np.full(self.ep_size, copies // self.ep_size)
        self.output_splits_tp = np.full(self.tp_size, copies)
        counts = np.full((ranks, self.num_local_experts), copies // experts)
        self.num_global_tokens_per_local_expert = counts
        return counts.sum(0)

    def masked_select(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        places = torch.empty(mask.numel() * top_k // experts, dtype=torch.long)
        return values.reshape(-1).index_select(0, places)

    put(MoEAlltoAllTokenDispatcher, preprocess=preprocess)
    put(torch.Tensor, masked_select=masked_select)


def _stacking(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """torch.tensor, which of a list of tensors would read the values."""

    def made(data: Any, *args: Any, **options: Any) -> torch.Tensor:
        parts = tensors_of(data) if isinstance(data, list) else []
        if parts:
            return torch.stack(parts)
        return plain(data, *args, **options)

    return made


def _copies(into: list[Any], value: Any, group: Any = None) -> None:
    into[:] = [value] * len(into)


def _apply(self: torch.nn.Module, function: Callable[..., Any], recurse: bool = True) -> Any:
    """Module._apply by `data` alone: torch would swap tensors, which fake ones refuse."""
    for child in self.children():
        _apply(child, function)
    for parameter in self.parameters(recurse=False):
        parameter.data = function(parameter.data)
    for name, held in self.named_buffers(recurse=False):
        setattr(self, name, function(held))
    return self


@functools.cache
def send_aliases() -> None:
    """Send an alias of each output: until 0.17.1 megatron-core's interleaving frees one that is
    still sent.

    A send holds its tensor, not the data that is taken from it: losses were up to 6e-2 off.
    """
    from megatron.core.pipeline_parallel import p2p_communication

    send: Any = p2p_communication._p2p_ops

    def aliased(*, tensor_send_next: torch.Tensor | None, **others: Any) -> Any:
        if tensor_send_next is not None:
            tensor_send_next = tensor_send_next.detach()
        return send(tensor_send_next=tensor_send_next, **others)

    p2p_communication._p2p_ops = aliased


def use_torch_optimizer() -> None:
    """Let megatron-core take torch's AdamW also with apex or Transformer Engine."""
    from megatron.core import optimizer

    optimizer.USING_PYTORCH_OPTIMIZER = True


def use_weight_product(product: Callable[..., None]) -> None:
    """Let megatron-core's linear layers add to gradients by `product`, not by apex's."""
    from megatron.core.tensor_parallel import layers

    layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(wgrad_gemm_accum_fp32=product)
    layers._grad_accum_fusion_available = True


def add_by_autograd(ddp: Any) -> None:
    """Let autograd add into the buffer of megatron-core's DDP, which reduces at the end.

    It has a hook in Python at each parameter, also where it has nothing to reduce yet.
    """
    ddp.grad_accs.clear()  # the nodes that have the hooks
    for parameter in ddp.params_with_grad:
        # with this mark a linear layer that has added a gradient would return another one
        del parameter.grad_added_to_main_grad
        parameter.grad_dtype = None  # fp32 for values of 16 bits
    ddp.params_with_grad = []
    # gloo takes milliseconds to reduce what no other rank has; experts have other replicas
    if ddp.dp_cp_group.size() == 1 and not ddp.expert_parallel_bucket_groups:
        ddp.finish_grad_sync = lambda **_: None


def on_host(place: Any, name: str) -> None:
    """Let calls of this function, where there is one, keep what the backward pass needs in host
    memory, page-locked where there is a GPU.
    """
    if hasattr(place, name):
        setattr(place, name, functools.partial(_called_on_host, getattr(place, name)))


def _called_on_host(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return function(*args, **options)


def inputs_on_host(model: Any) -> None:
    """Do so where layers are recomputed: megatron-core's, so named also in deepspeed_3d, and those
    of transformers, whose own way asks for page-locked memory without a GPU, too.
    """
    from megatron.core.transformer import transformer_block

    on_host(transformer_block, "checkpointed_forward")  # from 0.18 on no method of the block
    for module in model.modules():
        on_host(module, "_checkpointed_forward")
        on_host(module, "_gradient_checkpointing_func")


def use_experts() -> None:
    """Let megatron-core have experts without Transformer Engine, and without a GPU."""
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    if not hasattr(moe_utils, "te_general_gemm"):  # 0.16.1 asks for what it has not imported
        put(moe_utils, te_general_gemm=None)
    if not torch.cuda.is_available():
        put(MoEAlltoAllTokenDispatcher, _maybe_dtoh_and_synchronize=_as_numbers)


def _as_numbers(dispatcher: Any, point: str, counts: Any = None) -> Any:
    """Numbers of tokens as numpy's: gloo's all-to-all takes no tensors for them, and megatron-core
    moves those of a card alone.
    """
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        sizes = getattr(dispatcher, name)
        if sizes is not None:
            put(dispatcher, **{name: np.asarray(sizes)})
    return counts


def use_cpu() -> None:
    """What DeepSpeed would compile, count or refuse on a CPU."""
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    # a shared-memory all-reduce, which takes 20 s to build and fails without a C++ compiler
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    accelerator = get_accelerator()
    # torch's kernels support it, ten times slower than fp32: enough for a test
    accelerator.is_fp16_supported = lambda: True
    # it starts a process to count NUMA nodes; ZeRO 3 asks for each gradient
    accelerator.device_count = functools.cache(accelerator.device_count)


def import_compiler() -> None:
    """torch's compiler, whose first import fails inside zero.Init: that replaces Tensor.__new__."""
    importlib.import_module("torch._dynamo")


def wrap_instructions(engine: Any, wrapped: Callable[[str, Any], Any]) -> None:
    """Let DeepSpeed's pipeline follow each instruction, by its name, by the wrapped method."""
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.schedule import BackwardPass

    def backward(self: Any, buffer_id: int) -> None:
        """On the last stage it keeps the logits until the buffer is next used."""
        PipelineEngine._exec_backward_pass(self, buffer_id)
        self.pipe_buffers["outputs"][buffer_id] = None

    methods = engine._INSTRUCTION_MAP | {BackwardPass: backward}
    engine._INSTRUCTION_MAP = {kind: wrapped(kind.__name__, f) for kind, f in methods.items()}


def link_moments(optimizer: Any) -> None:
    """Link moments to parameters, as ZeRO 1 and 2 do when those of the first group exist."""
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()


def fragment(parameter: Any) -> Any:
    """The share of a parameter in this rank's part of ZeRO 1 and 2; None where it has none."""
    return parameter._hp_mapping


def partition(parameter: Any, key: str | None) -> torch.Tensor:
    """This rank's part, padded, of a parameter under ZeRO 3 or of its moment `key`; no copy.

    safe_get_local_fp32_param() copies it where it is offloaded.
    """
    part_of = parameter._z3_optimizer._get_fp32_opt_state_partition
    return part_of(parameter, release_swap_buffers=False, optim_state_key=key)[0]


def without_messages(shape: list[int], dtype: torch.dtype) -> None:
    """In a trace: DeepSpeed compares no numbers; a stage knows its input's shape, untold."""
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.zero import partitioned_param_coordinator

    untold = lambda self, _: self._allocate_or_extend_buffers(0, shape, dtype)  # noqa: E731
    put(PipelineEngine, _recv_tensor_meta=untold)
    put(partitioned_param_coordinator, assert_ints_same_as_other_ranks=lambda numbers: None)


def without_initial_values() -> None:
    """Let transformers gather no module under ZeRO 3 for values that ours replace."""
    from transformers.integrations import deepspeed

    deepspeed.initialize_weights_zero3 = lambda model: None


def without_graph() -> None:
    """In a trace: transformers takes no fake tensor for a graph's, and makes no mask."""
    from transformers import masking_utils

    masking_utils.is_tracing = lambda *_: False
