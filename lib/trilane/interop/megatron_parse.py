"""The plan that arguments of Megatron-LM or Megatron-DeepSpeed describe, and those that a plan
cannot represent.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from trilane.config.batch_rampup import Ramp, parse_ramp
from trilane.config.cluster import Cluster
from trilane.config.model import GATED, ModelShape, padded_vocab_size
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Dropout, Optimizer, Part, Run
from trilane.interop.megatron_args import known_arguments
from trilane.utils.numbers import ranges
from trilane.utils.validation import parse_integers, require, require_known

T = TypeVar("T")


class Given:
    """Arguments that record which of them were read."""

    def __init__(self, values: Mapping[str, list[str]]) -> None:
        self._values, self.read = values, set[str]()

    def has(self, name: str) -> bool:
        self.read.add(name)
        return name in self._values

    def all(self, name: str) -> list[str]:
        return self._values[name] if self.has(name) else []

    def get(self, name: str, kind: Callable[[str], T], default: T | None = None) -> T:
        """The value of `name`. Raises ValueError if it is missing without a `default`, or not of
        that kind.
        """
        values, option = self.all(name), f"--{name.replace('_', '-')}"
        if not values and default is not None:
            return default
        require(len(values) == 1, option, " ".join(values) or "missing", "needs one value")
        try:
            value = kind(values[0])
        except ValueError:
            value = None
        is_finite = value is not None and not (
            isinstance(value, float) and not math.isfinite(value)
        )
        require(is_finite, option, values[0], "must be a number")
        return value  # type: ignore[return-value]

    def fields(self, kind: type, usual: Mapping[str, Any] = {}) -> dict[str, Any]:
        """The fields of a dataclass that have an argument of their own; one that is missing is as
        `usual`.
        """
        found: dict[str, Any] = {}
        for f in fields(kind):
            if name := f.metadata.get("megatron", "").replace("-", "_"):
                default = usual.get(
                    f.name, f.default if isinstance(f.default, int | float) else None
                )
                if f.type is bool:
                    found[f.name] = self.has(name)
                else:
                    found[f.name] = self.get(name, f.type, default)  # type: ignore[arg-type]
        return found


@dataclass(frozen=True, kw_only=True)
class ParsedPlan:
    """A plan, and the arguments that it does not represent: `ignored` as irrelevant to a plan,
    `unknown`, and in `differs` values that a plan has otherwise, as `name=value: a plan has ...`.
    """

    plan: Plan
    ignored: tuple[str, ...]
    unknown: tuple[str, ...]
    differs: tuple[str, ...]

    @property
    def notes(self) -> list[str]:
        """What the plan does not represent: a line for each argument that matters, and one for all
        that do not.
        """
        lines = [*self.differs, *(f"{name}: unknown, not in the plan" for name in self.unknown)]
        return lines + ([f"not part of a plan: {', '.join(self.ignored)}"] if self.ignored else [])


def parse_plan(
    values: Mapping[str, list[str]],
    *,
    cluster: Cluster,
    gpus: int = 0,
    vocab_size: int = 0,
    label: str = "read",
) -> ParsedPlan:
    """The plan of the arguments. Raises ValueError if some are missing or contradict each other.

    `gpus` 0 takes the launcher's --nproc_per_node and --nnodes among them. `vocab_size` (padded) is
    needed if they name only a tokenizer.
    """
    given = Given(values)
    for name, rule in known_arguments()["refused"].items():
        text = " ".join(given.all(name)).strip("[]") if given.has(name) else "0"
        require(text in ("0", "0.0", "None"), f"--{name.replace('_', '-')}", text or "yes", rule)
    is_fork, data = given.has("deepspeed"), _data(given)
    require(
        bool(gpus) or given.has("nproc_per_node"),
        "gpus",
        "missing",
        "is not among the arguments; pass it",
    )
    topology = _topology(
        given, is_fork, gpus or given.get("nproc_per_node", int) * given.get("nnodes", int, 1)
    )
    run = _run(given, data, topology.gbs)
    plan = Plan(
        label=label,
        engine="deepspeed-3d" if is_fork else "megatron",
        shape=_shape(given, vocab_size),
        cluster=cluster,
        topology=topology,
        data=data,
        optimizer=_optimizer(given, run, topology.gbs),
        dropout=Dropout(**given.fields(Dropout, {"hidden": 0.1, "attention": 0.1})),
        run=run,
    )
    known = known_arguments()
    rest = {*values} - given.read - {*known["one_way"], "max_position_embeddings"}
    ignored = {*known["ignored"]}.union(*known["elsewhere"].values())
    left = {"ignored": tuple(sorted(rest & ignored)), "unknown": tuple(sorted(rest - ignored))}
    return ParsedPlan(plan=plan, differs=differing(values, plan), **left)


def differing(values: Mapping[str, list[str]], plan: Plan) -> tuple[str, ...]:
    """The values that the plan read from them has otherwise, as `name=value: a plan has ...`."""
    wanted: dict[str, Any] = known_arguments()["one_way"]
    if plan.shape.positions == "learned":  # a table of so many rows
        wanted = wanted | {"max_position_embeddings": str(plan.shape.seq_length)}
    if plan.topology.recompute == "block":
        layers = str(plan.topology.recompute_layers)
        wanted = wanted | {"recompute_method": "block", "recompute_num_layers": layers}
    usual = {**wanted, "lr_decay_style": "linear"}  # the default of the programs
    given = {n: " ".join(values.get(n, [usual[n]])) or "yes" for n in wanted}
    found = [
        f"{n}={given[n]}: a plan has {value}"
        for n, value in wanted.items()
        if not _same(given[n], value)
    ]
    coder = " ".join(values.get("tokenizer_type", ["its own"] if "vocab_file" in values else []))
    ours = coder == "NullTokenizer" and values.get("vocab_size") in (["256"], ["257"])
    if coder not in ("", "HuggingFaceTokenizer", "PretrainedFromHF") and not ours:
        found.append(
            f"tokenizer_type={coder}: a plan has the tokenizer of a folder, or {plan.data.tokenizer}"
        )
    return (
        *found,
        *([] if "data_path" in values else [f"data_path=missing: the plan has {plan.data.source}"]),
    )


def _same(text: str, value: str) -> bool:
    try:
        return float(text) == float(value)
    except ValueError:
        return text == value


def _shape(given: Given, vocab_size: int) -> ModelShape:
    """The shape. Both programs' names are read, and those of Microsoft's fork of Megatron-DeepSpeed
    (Llama scripts).

    With --swiglu an MLP without --ffn-hidden-size has 8/3 h, with --glu-activation it has 4 h
    (their arguments.py).
    """
    gate, sizes = given.get("glu_activation", str, "gelu"), given.fields(ModelShape)
    require(gate in ("gelu", *GATED), "--glu-activation", gate, f"a plan has {', '.join(GATED)}")
    exact = given.has("no_bias_gelu_fusion") or given.has(
        "disable_bias_linear"
    )  # their fused kernel has the tanh form
    plain = gate if exact or gate != "gelu" else "gelu-tanh"
    activation = next(
        (kind for kind in ("swiglu", "squared-relu") if given.has(kind.replace("-", "_"))), plain
    )
    norm, qkv = given.get("normalization", str, "LayerNorm").lower(), given.has("add_qkv_bias")
    require_known("--normalization", norm, ("layernorm", "rmsnorm"))
    usual = 0 if activation != gate else 4 * sizes["hidden_size"]
    groups = given.get("num_query_groups", int, 1) if given.has("group_query_attention") else 0
    epsilons = [given.get(n, float) for n in ("norm_epsilon", "layernorm_epsilon") if given.has(n)]
    shape = ModelShape(
        **sizes,
        vocab_size=_rows(given, vocab_size),
        activation=activation,
        normalization=norm,
        positions=_positions(given),
        biases="all" if not given.has("disable_bias_linear") else "qkv" if qkv else "none",
        ffn_hidden_size=given.get("ffn_hidden_size", int, usual) or None,
        num_key_value_heads=(groups or given.get("num_key_value_heads", int, 0)) or None,
        tied_embeddings=not given.has("untie_embeddings_and_output_weights"),
        embedding_layernorm=given.has("embed_layernorm"),
        norm_epsilon=next(iter(epsilons), ModelShape.norm_epsilon),
        rotary_base=given.get("rotary_base", float, ModelShape.rotary_base),
    )
    wide = given.get("kv_channels", int, shape.head_dim)
    require(
        wide == shape.head_dim,
        "--kv-channels",
        wide,
        f"a plan has hidden-size / heads = {shape.head_dim}",
    )
    return shape


def _positions(given: Given) -> str:
    words = {
        "learned_absolute": "learned",
        "absolute": "learned",
        "rope": "rotary",
        "rotary": "rotary",
    }
    words |= {"alibi": "alibi", "none": "none"}
    word = given.get("position_embedding_type", str, "learned_absolute")
    turned = given.has("use_rotary_position_embeddings")
    require_known("--position-embedding-type", word, words)
    rule = f"contradicts --position-embedding-type {word}: a model has one kind of positions"
    require(
        not turned or word not in ("alibi", "none"), "--use-rotary-position-embeddings", "yes", rule
    )
    return "rotary" if turned else words[word]


def _rows(given: Given, vocab_size: int) -> int:
    """Rows of the embedding: the padded size among the arguments, else the one given, else their
    vocabulary.

    The latter two are padded as the programs do where they are not. NullTokenizer adds an end of
    document, until core 0.17: from 0.18 on the vocabulary has it.
    """
    for name in ("padded_vocab_size", "pad_vocab_size_to"):
        if given.has(name):
            return given.get(name, int)
    tokens = given.get("vocab_size", int, 0)
    tokens += tokens > 0 and given.all("tokenizer_type") == ["NullTokenizer"]
    tp, step = (
        given.get("tensor_model_parallel_size", int, 1),
        given.get("make_vocab_size_divisible_by", int, 128),
    )
    require(
        (vocab_size or tokens) > 0,
        "vocab_size",
        "missing",
        "is not among the arguments; pass the padded size",
    )
    require(step > 0, "--make-vocab-size-divisible-by", step, "must be a whole number above zero")
    is_padded = vocab_size and vocab_size % tp == 0
    return vocab_size if is_padded else padded_vocab_size(vocab_size or tokens, tp, step)


def _topology(given: Given, is_fork: bool, gpus: int) -> Topology:
    sizes = given.fields(Topology, {"mbs": None, "gbs": 0})
    tp, pp, cp = sizes["tp"], sizes["pp"], sizes["cp"]
    product = f"tp x pp = {tp} x {pp}" if cp == 1 else f"tp x cp x pp = {tp} x {cp} x {pp}"
    require(
        min(tp, pp, cp) > 0 and gpus % (tp * pp * cp) == 0,
        "gpus",
        gpus,
        f"must be a multiple of {product}",
    )
    dp, precision = gpus // (tp * pp * cp), _precision(given)
    zero = (
        given.get("zero_stage", int, 1) if is_fork else int(given.has("use_distributed_optimizer"))
    )
    if is_fork and precision == "bf16" and zero == 0:
        zero = 1  # its pipeline then uses BF16_Optimizer, which shards its states over the replicas
    if given.has("num_layers_per_virtual_pipeline_stage"):
        layers, each = (
            given.get("num_layers", int),
            given.get("num_layers_per_virtual_pipeline_stage", int),
        )
        rule = f"x pp={pp} must divide num-layers={layers}"
        require(
            each > 0 and layers % (each * pp) == 0,
            "num-layers-per-virtual-pipeline-stage",
            each,
            rule,
        )
        sizes["interleaving"] = layers // (each * pp)
    sums = given.has("accumulate_allreduce_grads_in_fp32") or precision in ("bf16", "fp8")
    sizes["gbs"] = sizes["gbs"] or sizes["mbs"] * dp
    sizes["sequence_parallel"] &= tp > 1  # Megatron-LM drops it without tp, too
    part = (
        "selective"
        if given.has("recompute_activations")
        else given.get("recompute_granularity", str, "none")
    )
    sizes["recompute"] = "full" if given.has("checkpoint_activations") else part
    if sizes["recompute"] == "full" and given.all("recompute_method") == ["block"] and not is_fork:
        sizes |= {"recompute": "block", "recompute_layers": given.get("recompute_num_layers", int)}
    return Topology(
        **sizes,
        dp=dp,
        zero=zero,
        partition=_partition(given),
        offload="optimizer" if given.has("cpu_optimizer") else "none",
        precision=precision,
        fp32_gradients=sums and precision != "fp32",
    )


def _precision(given: Given) -> str:
    """ "fp8" with either of Transformer Engine's formats: e4m3 for all, or hybrid, e5m2 for
    gradients.
    """
    if given.has("fp8_format"):
        word = given.get("fp8_format", str)
        require_known("--fp8-format", word, ("hybrid", "e4m3"))
        require(given.has("bf16"), "--fp8-format", word, "a plan has it with --bf16 alone")
        return "fp8"
    return next((name for name in ("fp16", "bf16") if given.has(name)), "fp32")


def _partition(given: Given) -> str:
    embedding, loss = (
        given.has(f"account_for_{what}_in_pipeline_split") for what in ("embedding", "loss")
    )
    require(
        embedding == loss,
        "account-for-embedding-in-pipeline-split",
        embedding,
        "a plan has both or neither",
    )
    method = given.get("pp_partition_method", str, "type:transformer")
    return (
        "type:transformer|embedding"
        if embedding
        else "uniform"
        if method == "type:transformer"
        else method
    )


def _run(given: Given, data: Data, gbs: int) -> Run:
    """Both programs count in samples or iterations; a plan's length is in iterations."""
    words, ramp = given.all("rampup_batch_size"), Ramp()
    if given.has("rampup_batch_size"):
        ok = len(words) == 3 and all(word.replace("_", "").isdecimal() for word in words)
        require(
            ok,
            "--rampup-batch-size",
            " ".join(words) or "missing",
            "must be START INCREMENT SAMPLES",
        )
        ramp = parse_ramp(",".join(words))
    by_samples, skipped = given.has("train_samples"), given.all("iterations_to_skip")
    numbers = parse_integers("--iterations-to-skip", ",".join(skipped)) if skipped else []
    run = Run(
        train_iters=ramp.iterations(given.get("train_samples", int), gbs)
        if by_samples
        else given.get("train_iters", int),
        ramp=ramp,
        timers=given.get("timing_log_level", int, 0) > 0,
        skip=ranges({*numbers}, most=len(numbers)).replace(" ", ""),
    )
    own = given.fields(Run, {"log_interval": 100, "eval_interval": 1000, "eval_iters": 100})
    # nothing is evaluated where no document or batch is left for it
    evaluates = data.shares[1] and own["eval_interval"] and own["eval_iters"]
    return replace(run, **own if evaluates else {**own, "eval_interval": 0, "eval_iters": 0})


def _optimizer(given: Given, run: Run, gbs: int) -> Optimizer:
    """Warm-up and decay in samples; decay over the whole run, the programs' default, is 0 in a
    plan.
    """
    usual = {"lr": None, "min_lr": 0.0, "weight_decay": 0.01, "adam_beta2": 0.999}
    own, whole = given.fields(Optimizer, usual), run.ramp.consumed(run.train_iters, gbs)
    decay = own["decay_samples"] or gbs * given.get("lr_decay_iters", int, 0)
    warmup = own["warmup_samples"] or gbs * given.get("lr_warmup_iters", int, 0)
    if given.has("lr_warmup_fraction"):  # of the decay, as in both programs
        warmup = round(given.get("lr_warmup_fraction", float) * (decay or whole))
    return Optimizer(
        **{**own, "warmup_samples": warmup, "decay_samples": 0 if decay == whole else decay}
    )


def _data(given: Given) -> Data:
    """Datasets by their prefixes; the tokenizer if it is a folder or NullTokenizer, else "bytes"."""
    coder = next(
        (given.get(n, str) for n in ("tokenizer_model", "tokenizer_name_or_path") if given.has(n)),
        "bytes",
    )
    given.read |= {"tokenizer_type", "vocab_size"}
    words, split = (
        given.all("data_path"),
        Data(split="".join(given.all("split")) or "969,30,1"),
    )  # the default
    data = Data(tokenizer=coder, split=split.split if split.shares[0] < 1 else "")
    if len(words) < 2:
        return replace(data, source=words[0]) if words else data
    try:
        parts = [
            Part(weight=float(w), source=s) for w, s in zip(words[::2], words[1::2], strict=True)
        ]
    except ValueError:
        raise ValueError(
            f"--data-path={' '.join(words)}: must be WEIGHT PREFIX WEIGHT PREFIX ..."
        ) from None
    return replace(data, source="blend", blend=tuple(parts))
