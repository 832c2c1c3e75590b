"""The plan that arguments of Megatron-LM or Megatron-DeepSpeed describe, and those that a plan cannot represent."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trilane.config.batch_rampup import Ramp
from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape, padded_vocab_size
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Dropout, Optimizer, Part, Run, ranges_of, ranges_text
from trilane.interop.megatron_args import DEEPSPEED, ENGINE_OF, LM, read_kind
from trilane.interop.megatron_differences import differing, known_arguments, unread
from trilane.interop.shell_args import Given
from trilane.utils.validation import parse_integers, require, require_known


@dataclass(frozen=True, kw_only=True)
class ParsedPlan:
    """A plan, and the arguments that it does not represent: `ignored` as irrelevant to a plan, `unknown`, and in
    `differs` values that a plan has otherwise, as `name=value: a plan has ...`.
    """

    plan: Plan
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]
    differs: tuple[str, ...]

    @property
    def notes(self) -> list[str]:
        """What the plan does not represent: a line for each argument that matters, and one for all that do not."""
        lines = [*self.differs, *(f"{name}: unknown, not in the plan" for name in self.unknown)]
        return lines + ([f"not part of a plan: {', '.join(self.ignored)}"] if self.ignored else [])


def parse_plan(
    values: Mapping[str, list[str]], *, cluster: Cluster, gpus: int = 0, vocab_size: int = 0, label: str = "read"
) -> ParsedPlan:
    """The plan of the arguments. Raises ValueError if some are missing or contradict each other.

    `gpus` 0 takes the launcher's --nproc_per_node and --nnodes among them. `vocab_size` (padded) is needed if they name
    only a tokenizer.
    """
    given = Given(values)
    _require_dense(given)
    flavour = DEEPSPEED if given.has("deepspeed") else LM
    topology, data = _topology(given, flavour, gpus or _gpus(given)), _data(given)
    optimizer, run = _optimizer_and_run(given, topology.gbs)
    interval, batches = _evaluation(given, data)
    run = replace(run, eval_interval=interval, eval_iters=batches)
    plan = Plan(
        label=label,
        engine=ENGINE_OF[flavour],
        shape=_shape(given, vocab_size),
        cluster=cluster,
        topology=topology,
        data=data,
        optimizer=optimizer,
        dropout=Dropout(
            hidden=given.get("hidden_dropout", float, 0.1), attention=given.get("attention_dropout", float, 0.1)
        ),
        run=run,
    )
    ignored, unknown = unread(set(values) - given.read)
    return ParsedPlan(plan=plan, ignored=ignored, unknown=unknown, differs=differing(values, plan))


def _gpus(given: Given) -> int:
    require(given.has("nproc_per_node"), "gpus", "missing", "is not among the arguments; pass it")
    return given.get("nproc_per_node", int) * given.get("nnodes", int, 1)


def _require_dense(given: Given) -> None:
    """Raise ValueError for the arguments of a model that is not a dense decoder of equal layers, by name."""
    for name, rule in known_arguments()["refused"].items():
        text = " ".join(given.all(name)).strip("[]") if given.has(name) else "0"
        require(text in ("0", "0.0", "None"), f"--{name.replace('_', '-')}", text or "yes", rule)


def _shape(given: Given, vocab_size: int) -> ModelShape:
    kind, heads = read_kind(given), given.get("num_attention_heads", int)
    shape = ModelShape(
        num_layers=given.get("num_layers", int),
        hidden_size=given.get("hidden_size", int),
        num_attention_heads=heads,
        seq_length=given.get("seq_length", int),
        vocab_size=_rows(given, vocab_size),
        **kind,
    )
    wide = given.get("kv_channels", int, shape.head_dim)
    require(wide == shape.head_dim, "--kv-channels", wide, f"a plan has hidden-size / heads = {shape.head_dim}")
    return shape


def _rows(given: Given, vocab_size: int) -> int:
    """Rows of the embedding: the padded size among the arguments, else the one given, else their vocabulary.

    The latter two are padded as the programs do where they are not. NullTokenizer adds an end-of-document token.
    """
    for name in ("padded_vocab_size", "pad_vocab_size_to"):
        if given.has(name):
            return given.get(name, int)
    tokens = given.get("vocab_size", int, 0)
    tokens += tokens > 0 and given.all("tokenizer_type") == ["NullTokenizer"]
    tp, step = given.get("tensor_model_parallel_size", int, 1), given.get("make_vocab_size_divisible_by", int, 128)
    if vocab_size and vocab_size % tp == 0:
        return vocab_size
    found = vocab_size or tokens
    require(found > 0, "vocab_size", "missing", "is not among the arguments; pass the padded size")
    require(step > 0, "--make-vocab-size-divisible-by", step, "must be a whole number above zero")
    return padded_vocab_size(found, tp, step)


def _topology(given: Given, flavour: str, gpus: int) -> Topology:
    tp, pp = given.get("tensor_model_parallel_size", int, 1), given.get("pipeline_model_parallel_size", int, 1)
    cp = given.get("context_parallel_size", int, 1)
    product = f"tp x pp = {tp} x {pp}" if cp == 1 else f"tp x cp x pp = {tp} x {cp} x {pp}"
    require(min(tp, pp, cp) > 0 and gpus % (tp * pp * cp) == 0, "gpus", gpus, f"must be a multiple of {product}")
    mbs, dp = given.get("micro_batch_size", int), gpus // (tp * pp * cp)
    precision = _precision(given)
    sums = given.has("accumulate_allreduce_grads_in_fp32") or precision in ("bf16", "fp8")
    embedding, loss = (given.has(f"account_for_{what}_in_pipeline_split") for what in ("embedding", "loss"))
    require(embedding == loss, "account-for-embedding-in-pipeline-split", embedding, "a plan has both or neither")
    method = given.get("pp_partition_method", str, "type:transformer")
    zero = given.get("zero_stage", int, 1) if flavour == DEEPSPEED else int(given.has("use_distributed_optimizer"))
    if flavour == DEEPSPEED and precision == "bf16" and zero == 0:
        zero = 1  # its pipeline then uses BF16_Optimizer, which shards its states over the replicas
    return Topology(
        tp=tp,
        cp=cp,
        pp=pp,
        dp=dp,
        mbs=mbs,
        gbs=given.get("global_batch_size", int, mbs * dp),
        zero=zero,
        recompute=_recompute(given),
        interleaving=_interleaving(given, pp),
        partition="type:transformer|embedding" if embedding else "uniform" if method == "type:transformer" else method,
        sequence_parallel=given.has("sequence_parallel") and tp > 1,  # Megatron-LM drops it without tp, too
        offload="optimizer" if given.has("cpu_optimizer") else "none",
        precision=precision,
        first_stage_layers=given.get("decoder_first_pipeline_num_layers", int, 0),
        last_stage_layers=given.get("decoder_last_pipeline_num_layers", int, 0),
        overlap_grad_reduce=given.has("overlap_grad_reduce"),
        overlap_param_gather=given.has("overlap_param_gather"),
        fp32_gradients=sums and precision != "fp32",
    )


def _precision(given: Given) -> str:
    """ "fp8" with either of Transformer Engine's formats: e4m3 for all, or hybrid, e5m2 for gradients."""
    if given.has("fp8_format"):
        require_known("--fp8-format", given.get("fp8_format", str), ("hybrid", "e4m3"))
        require(given.has("bf16"), "--fp8-format", given.get("fp8_format", str), "a plan has it with --bf16 alone")
        return "fp8"
    return next((name for name in ("fp16", "bf16") if given.has(name)), "fp32")


def _recompute(given: Given) -> str:
    if given.has("checkpoint_activations"):
        return "full"
    return "selective" if given.has("recompute_activations") else given.get("recompute_granularity", str, "none")


def _interleaving(given: Given, pp: int) -> int:
    """Model chunks per stage, from either of two arguments."""
    chunks = given.get("num_virtual_stages_per_pipeline_rank", int, 1)
    if not given.has("num_layers_per_virtual_pipeline_stage"):
        return chunks
    layers, each = given.get("num_layers", int), given.get("num_layers_per_virtual_pipeline_stage", int)
    rule = f"x pp={pp} must divide num-layers={layers}"
    require(each > 0 and layers % (each * pp) == 0, "num-layers-per-virtual-pipeline-stage", each, rule)
    return layers // (each * pp)


def _optimizer_and_run(given: Given, gbs: int) -> tuple[Optimizer, Run]:
    """Both programs count in samples or iterations; a plan has warm-up and decay in samples, its length in iterations.

    Decay over the whole run, their default, is 0 in a plan.
    """
    ramp = Ramp()
    if given.has("rampup_batch_size"):
        words = given.all("rampup_batch_size")
        ok = len(words) == 3 and all(word.replace("_", "").isdecimal() and len(word) < 19 for word in words)
        require(ok, "--rampup-batch-size", " ".join(words) or "missing", "must be START INCREMENT SAMPLES")
        start, increment, ramped = (int(word) for word in words)
        ramp = Ramp(start=start, increment=increment, samples=ramped)
    by_samples = given.has("train_samples")
    iterations = ramp.iterations(given.get("train_samples", int), gbs) if by_samples else given.get("train_iters", int)
    warmup = given.get("lr_warmup_samples", int, 0) or gbs * given.get("lr_warmup_iters", int, 0)
    decay = given.get("lr_decay_samples", int, 0) or gbs * given.get("lr_decay_iters", int, 0)
    whole = ramp.consumed(iterations, gbs)
    if given.has("lr_warmup_fraction"):  # of the decay, as in both programs
        warmup = round(given.get("lr_warmup_fraction", float) * (decay or whole))
    numbers: dict[str, Any] = {name: given.get(name, float, usual) for name, usual in USUAL.items()}
    optimizer = Optimizer(
        lr=given.get("lr", float),
        warmup_samples=warmup,
        decay_samples=0 if decay == whole else decay,
        init_std=given.get("init_method_std", float, Optimizer.init_std),
        **numbers,
    )
    skipped = given.all("iterations_to_skip")
    run = Run(
        train_iters=iterations,
        log_interval=given.get("log_interval", int, 100),
        seed=given.get("seed", int, 1234),
        ramp=ramp,
        timers=given.get("timing_log_level", int, 0) > 0,
        tensorboard=given.has("tensorboard_dir"),
        skip=ranges_text(ranges_of(parse_integers("--iterations-to-skip", ",".join(skipped)) if skipped else ())),
    )
    return optimizer, run


def _data(given: Given) -> Data:
    """Datasets by their prefixes; the tokenizer if it is a folder or NullTokenizer, else "bytes"."""
    coder = next((given.get(n, str) for n in ("tokenizer_model", "tokenizer_name_or_path") if given.has(n)), "bytes")
    given.read |= {"tokenizer_type", "vocab_size"}
    words = given.all("data_path")
    split = Data(split="".join(given.all("split")) or SPLIT)
    data = Data(tokenizer=coder, split=split.split if split.shares[0] < 1 else "")
    if len(words) < 2:
        return replace(data, source=words[0]) if words else data
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        raise ValueError(f"--data-path={' '.join(words)}: must be WEIGHT PREFIX WEIGHT PREFIX ...") from None
    parts = zip(weights, words[1::2], strict=True)
    return replace(data, source="blend", blend=tuple(Part(source=s, weight=w) for w, s in parts))


def _evaluation(given: Given, data: Data) -> tuple[int, int]:
    """eval_interval and eval_iters of a Run: 0 where no document or batch is left for it."""
    interval, batches = given.get("eval_interval", int, 1000), given.get("eval_iters", int, 100)
    return (interval, batches) if data.shares[1] and interval and batches else (0, 0)


SPLIT = "969,30,1"  # the programs' default
# The programs' defaults for the numbers of an Optimizer.
USUAL = {"min_lr": 0.0, "weight_decay": 0.01, "clip_grad": 1.0}
USUAL |= {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}
