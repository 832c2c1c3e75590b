"""What Megatron's arguments say that a plan cannot: what it has in one way only, and what is no matter of it."""

from collections.abc import Mapping
from typing import Any

from trilane.megatron_args import BYTES
from trilane.plan import Plan

# What a plan has in only one way; anything else is named.
ONE_WAY = {
    "lr_decay_style": "cosine",
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "optimizer": "adam",
    "init_method_std": "0.02",
    "recompute_method": "uniform",
    "recompute_num_layers": "1",
    "recompute_modules": "core_attn",
    "checkpoint_num_layers": "1",
}
ASSUMED = {"lr_decay_style": "linear"}  # by the programs
# Known, and no matter of a plan: where and how often it writes, kernels, workers, the launcher's own.
IGNORED = {
    *("save", "load", "save_interval", "log_throughput", "eval_iters", "eval_interval", "split", "data_cache_path"),
    *("data_impl", "num_workers", "dataloader_type", "vocab_file", "merge_file", "distributed_backend", "role"),
    *("kill_switch_path", "local_ranks_filter", "no_create_attention_mask_in_dataloader"),
    *("exit_duration_in_mins", "exit_interval", "tensorboard_queue_size", "log_timers_to_tensorboard", "ckpt_format"),
    *("log_batch_size_to_tensorboard", "log_validation_ppl_to_tensorboard", "initial_loss_scale", "loss_scale_window"),
    *("hysteresis", "min_loss_scale", "no_bias_gelu_fusion", "no_bias_dropout_fusion", "no_masked_softmax_fusion"),
    *("no_gradient_accumulation_fusion", "attention_backend", "use_flash_attn", "use_mcore_models", "transformer_impl"),
    *("deepspeed_config", "deepspeed_activation_checkpointing", "partition_activations", "cpu_torch_adam"),
    *("timing_log_option", "abort_on_unmet_fused_kernel_constraints"),
    *("make_vocab_size_divisible_by", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port", "tee"),
    *("jobid", "kill_on_bad_exit", "wait", "valid_num_workers"),
    *("rdzv_id", "rdzv_backend", "rdzv_endpoint", "rdzv_conf", "max_restarts", "codecarbon_dir", "local_rank"),
}  # fmt: skip
FOLLOWS = {"ffn_hidden_size", "kv_channels", "max_position_embeddings"}  # from a plan's shape, in one way
CODERS = ("HuggingFaceTokenizer", "PretrainedFromHF")  # the tokenizers of a folder


def differing(values: Mapping[str, list[str]], plan: Plan) -> tuple[str, ...]:
    """What the plan that was read from `values` has in another way, as `name=value: a plan has ...`."""
    wanted: dict[str, Any] = {**ONE_WAY, **_follows(plan)}
    said = {name: " ".join(values.get(name, [ASSUMED.get(name, str(value))])) for name, value in wanted.items()}
    found = [f"{n}={said[n]}: a plan has {value}" for n, value in wanted.items() if not _same(said[n], value)]
    coder = " ".join(values.get("tokenizer_type", ["its own"] if "vocab_file" in values else []))
    ours = coder == "NullTokenizer" and values.get("vocab_size") == [BYTES]
    if coder and coder not in CODERS and not ours:
        found.append(f"tokenizer_type={coder}: a plan has the tokenizer of a folder, or {plan.data.tokenizer}")
    if "data_path" not in values:
        found.append(f"data_path=missing: the plan has {plan.data.source}")
    return tuple(found)


def unasked(names: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the names that no reading asked for: those that are no matter of a plan, and those unknown to us."""
    rest = names - set(ONE_WAY) - FOLLOWS
    return tuple(sorted(rest & IGNORED)), tuple(sorted(rest - IGNORED))


def _follows(plan: Plan) -> dict[str, int]:
    h = plan.shape.hidden_size
    return dict(zip(sorted(FOLLOWS), (4 * h, plan.shape.head_dim, plan.shape.seq_length), strict=True))


def _same(said: str, value: Any) -> bool:
    try:
        return float(said) == float(value)
    except ValueError:
        return said == str(value)
