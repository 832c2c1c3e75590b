"""What the engine replaces in the libraries below, or takes of their private names."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

# a function of engine/patches.py, cpu.py or folder_lock.py, and what stands in the library as long
# as that is needed
ELASTIC, DDP = "torch/distributed/elastic", "megatron/core/distributed"
MOE = "megatron/core/transformer/moe"
PIPE, ZERO = "deepspeed/runtime/pipe", "deepspeed/runtime/zero"
NEEDED = [
    ("_Lock", "flufl/lock/_lockfile.py", r"_hostname = socket\.getfqdn\(\)"),
    ("enable_cpu", "megatron/core/tensor_parallel/random.py", r"def _set_cuda_rng_state"),
    ("enable_cpu", f"{DDP}/param_and_grad_buffer.py", r"torch\.cuda\.current_device\(\)"),
    ("join_fake_group", "torch/testing/_internal/distributed/fake_pg.py", r"FakeStore"),
    ("storage_key", "torch/storage.py", r"def _cdata"),
    ("stored_at", "torch/distributed/checkpoint/filesystem.py", r"class _StorageInfo"),
    ("after_start", f"{ELASTIC}/multiprocessing/api.py", r"SubprocessContext\(.*def _start\("),
    ("listen_on_loopback", f"{ELASTIC}/rendezvous/static_tcp_rendezvous.py", r"TCPStore\("),
    ("without_values", "torch/nn/modules/module.py", r"swap_tensors"),
    ("without_values", f"{DDP}/param_and_grad_buffer.py", r"_coalescing_manager\("),
    ("without_values", "megatron/core/tensor_parallel/random.py", r"_set_cuda_rng_state\("),
    ("use_torch_optimizer", "megatron/core/optimizer/__init__.py", r"if USING_PYTORCH_OPTIMIZER:"),
    ("use_weight_product", "megatron/core/tensor_parallel/layers.py", r"not _grad_accum_fusion"),
    ("add_by_autograd", f"{DDP}/distributed_data_parallel.py", r"self\.grad_accs\.append"),
    ("inputs_on_host", "transformers/modeling_layers.py", r"self\._gradient_checkpointing_func\("),
    ("enable_cpu", f"{MOE}/token_dispatcher.py", r"cuda_dtoh_stream = torch\.cuda\.Stream"),
    ("balance", f"{MOE}/token_dispatcher.py", r"def preprocess\(self, routing_map"),
    ("balance", f"{MOE}/moe_utils.py", r"\.masked_select\(routing_map"),
    ("use_cpu", "deepspeed/accelerator/cpu_accelerator.py", r"import get_numa_cores"),
    ("use_cpu", "deepspeed/comm/torch.py", r"build_shm_op\(\)"),
    ("import_compiler", f"{ZERO}/partition_parameters.py", r"torch\.Tensor\.__new__ = "),
    ("wrap_instructions", f"{PIPE}/engine.py", r"super\(\)\.backward\(self\.loss\)\n +return"),
    ("wrap_instructions", f"{PIPE}/engine.py", r"_INSTRUCTION_MAP = "),
    ("link_moments", f"{ZERO}/stage_1_and_2.py", r"if not self\._hp_optimizer_states_linked"),
    ("fragment", f"{ZERO}/stage_1_and_2.py", r"p\._hp_mapping"),
    ("partition", f"{ZERO}/stage3.py", r"_state\.to\(get_accelerator\(\)\.current_device_name"),
    ("without_messages", f"{PIPE}/engine.py", r"def _recv_tensor_meta"),
    ("without_messages", f"{ZERO}/partitioned_param_coordinator.py", r"assert_ints_same_as"),
    ("without_initial_values", "transformers/integrations/deepspeed.py", r"initialize_weights_z"),
    ("without_graph", "transformers/masking_utils.py", r"is_tracing\("),
]


@pytest.mark.parametrize(("patch", "file", "words"), NEEDED, ids=str)
def test_the_library_still_does_what_is_patched(patch: str, file: str, words: str):
    """Else the patch may go, or would do nothing."""
    library, _, rest = file.partition("/")
    places = [Path(folder, rest) for folder in find_spec(library).submodule_search_locations]
    text = "".join(place.read_text() for place in places if place.is_file())
    assert re.search(words, text, re.DOTALL), patch
