"""The plan that arguments of Megatron-LM or Megatron-DeepSpeed describe, and those that a plan
cannot represent.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, replace
from typing import Any, TypeVar

from trilane.config.batch_rampup import Ramp, parse_ramp
from trilane.config.cluster import Cluster
from trilane.config.model import GATED, MIXTURE, ModelShape, padded_vocab_size
from trilane.config.parallelism import DISPATCHERS, Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Dropout, Optimizer, Part, Run
from trilane.interop.megatron_args import Arguments, known_arguments
from trilane.interop.pipeline_layout import LAYOUT, layout_fields
from trilane.utils.frozen import frozen
from trilane.utils.numbers import ranges
from trilane.utils.validation import parse_integers, require, require_known, shown

T = TypeVar("T")
POSITIONS = {name: name for name in ("learned", "rotary", "alibi", "none")}
POSITIONS |= {"learned_absolute": "learned", "absolute": "learned", "rope": "rotary"}
DEALT = ("partition", "interleaving", "first_stage_layers", "last_stage_layers")
FOLDERS = ("", "HuggingFaceTokenizer", "PretrainedFromHF")  # tokenizers of a folder
DEFAULT_SPLIT = "969,30,1"


class Given:
    """Arguments that record which of them were read."""

    def __init__(self, values: Arguments) -> None:
        self._values = values
        self.read: set[str] = set()

    def has(self, name: str) -> bool:
        self.read.add(name)
        return name in self._values

    def all(self, name: str) -> list[str]:
        return self._values[name] if self.has(name) else []

    def get(self, name: str, kind: Callable[[str], T], default: T | None = None) -> T:
        """The value of `name`. Raises ValueError if it is missing without a `default`, or not of
        that kind.
        """
        values = self.all(name)
        if not values and default is not None:
            return default
        option = f"--{name.replace('_', '-')}"
        require(len(values) == 1, option, " ".join(values) or "missing", "needs one value")
        try:
            value = kind(values[0])
            is_finite = not isinstance(value, float) or math.isfinite(value)
        except ValueError:
            is_finite = False
        require(is_finite, option, values[0], "must be a number")
        return value

    def fields(self, kind: type, usual: Mapping[str, Any] = {}) -> dict[str, Any]:
        """The fields of a dataclass that have an argument of their own; one that is missing is as
        `usual`.
        """
        values: dict[str, Any] = {}
        for field in fields(kind):
            name = field.metadata.get("megatron", "").replace("-", "_")
            if name and field.type is bool:
                values[field.name] = self.has(name)
            elif name:
                default = usual.get(field.name, field.default)
                if default is MISSING:
                    default = None
                values[field.name] = self.get(name, field.type, default)  # type: ignore[arg-type]
        return values


@frozen
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
        """What the plan does not represent: a line for each argument that it has otherwise, one for
        all that are unknown, and one for all that do not matter.
        """
        notes = [*self.differs]
        lists = {"unknown, not in the plan": self.unknown, "not part of a plan": self.ignored}
        for title, names in lists.items():
            if names:
                notes.append(shown(f"{title}: {', '.join(names)}", 1000))
        return notes


def parse_plan(
    values: Arguments,
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
    known = known_arguments()
    for name, rule in known["refused"].items():
        if given.has(name):
            text = " ".join(given.all(name)).strip("[]")
            option = f"--{name.replace('_', '-')}"
            off = ("0", "0.0", "None", known["off"].get(name))
            require(text in off, option, text or "yes", rule)
    is_fork = given.has("deepspeed")
    data = _data(given)
    has_gpus = bool(gpus) or given.has("nproc_per_node")
    require(has_gpus, "gpus", "missing", "is not among the arguments; pass it")
    gpus = gpus or given.get("nproc_per_node", int) * given.get("nnodes", int, 1)
    topology = _topology(given, is_fork, gpus)
    run = _run(given, data, topology.gbs)
    plan = Plan(
        label=label,
        engine="deepspeed-3d" if is_fork else "megatron",
        shape=shape_of(given, vocab_size),
        cluster=cluster,
        topology=topology,
        data=data,
        optimizer=_optimizer(given, run, topology.gbs),
        dropout=Dropout(**given.fields(Dropout, {"hidden": 0.1, "attention": 0.1})),
        run=run,
    )
    rest = {*values} - given.read - {*known["one_way"], "max_position_embeddings"}
    ignored = {*known["ignored"]}.union(*known["elsewhere"].values())
    return ParsedPlan(
        plan=plan,
        ignored=tuple(sorted(rest & ignored)),
        unknown=tuple(sorted(rest - ignored)),
        differs=differing(values, plan),
    )


def differing(values: Arguments, plan: Plan) -> tuple[str, ...]:
    """The values that the plan read from them has otherwise, as `name=value: a plan has ...`."""
    wanted: dict[str, Any] = dict(known_arguments()["one_way"])
    if plan.shape.positions == "learned":  # a table of so many rows
        wanted["max_position_embeddings"] = str(plan.shape.seq_length)
    if plan.topology.recompute == "block":
        wanted["recompute_method"] = "block"
        wanted["recompute_num_layers"] = str(plan.topology.recompute_layers)
    differs = []
    for name, value in wanted.items():
        # what the programs take by default is what a plan has
        text = " ".join(values.get(name, [value])) or "yes"
        if not _is_same(text, value):
            differs.append(f"{name}={text}: a plan has {value}")
    coder = " ".join(values.get("tokenizer_type", []))
    if "tokenizer_type" not in values and "vocab_file" in values:
        coder = "its own"
    is_ours = coder == "NullTokenizer" and values.get("vocab_size") in (["256"], ["257"])
    if coder not in FOLDERS and not is_ours:
        rule = f"a plan has the tokenizer of a folder, or {plan.data.tokenizer}"
        differs.append(f"tokenizer_type={coder}: {rule}")
    if plan.data.source == Data.source:
        text = " ".join(values.get("data_path", [])) or "missing"
        differs.append(f"data_path={text}: the plan has {plan.data.source}")
    return tuple(differs)


def _is_same(text: str, value: str) -> bool:
    try:
        return float(text) == float(value)
    except ValueError:
        return text == value


def shape_of(given: Given, vocab_size: int = 0) -> ModelShape:
    """The shape, by both programs' names and those of Microsoft's fork of Megatron-DeepSpeed (Llama
    scripts). Raises ValueError where a size is missing, or they do not fit together.
    """
    epsilon = given.get("layernorm_epsilon", float, ModelShape.norm_epsilon)
    sizes = given.fields(ModelShape, {"top_k": 2, "norm_epsilon": epsilon})
    sizes |= _experts(given, sizes)
    normalization = given.get("normalization", str, "LayerNorm").lower()
    require_known("--normalization", normalization, ("layernorm", "rmsnorm"))
    gate = given.get("glu_activation", str, "gelu")
    require(gate in ("gelu", *GATED), "--glu-activation", gate, f"a plan has {', '.join(GATED)}")
    activation = _activation(given, gate)
    # with --swiglu an MLP without --ffn-hidden-size has 8/3 h, with --glu-activation it has 4 h
    # (their arguments.py)
    usual_ffn = 4 * sizes["hidden_size"] if activation == gate else 0
    groups = 0
    if given.has("group_query_attention"):
        groups = given.get("num_query_groups", int, 1)
    biases = "all"
    if given.has("disable_bias_linear"):
        biases = "qkv" if given.has("add_qkv_bias") else "none"
    given.read.add("add_qkv_bias")
    return ModelShape(
        **sizes,
        vocab_size=_rows(given, vocab_size),
        activation=activation,
        normalization=normalization,
        positions=_positions(given),
        biases=biases,
        ffn_hidden_size=given.get("ffn_hidden_size", int, usual_ffn) or None,
        num_key_value_heads=groups or given.get("num_key_value_heads", int, 0) or None,
        tied_embeddings=not given.has("untie_embeddings_and_output_weights"),
        embedding_layernorm=given.has("embed_layernorm"),
        kv_channels=given.get("kv_channels", int, 0) or None,
    )


def _experts(given: Given, sizes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a mixture of experts; one expert is a dense model."""
    if sizes["experts"] < 2:
        return {name: getattr(ModelShape, name) for name in MIXTURE}
    balancing = given.get("moe_router_load_balancing_type", str, "aux_loss")
    require_known("--moe-router-load-balancing-type", balancing, ("aux_loss", "none"))
    shared = given.get("moe_shared_expert_intermediate_size", int, 0)
    usual = 4 * sizes["hidden_size"]
    if given.has("swiglu"):
        usual = usual * 2 // 3 // 64 * 64
    return {
        "expert_ffn": sizes["expert_ffn"] or given.get("ffn_hidden_size", int, usual),
        "shared_experts": int(shared > 0),
        "shared_ffn": shared,
        "first_dense": _first_dense(given, sizes["num_layers"]),
        "aux_loss": sizes["aux_loss"] if balancing == "aux_loss" else 0.0,
    }


def _first_dense(given: Given, layers: int) -> int:
    """Dense layers in front of those with experts: "([0]*3+[1]*58)", in a log a 0 or 1 each."""
    text = " ".join(given.all("moe_layer_freq")) or "1"
    if text == "1":
        return 0
    each = text.split()
    if "[" in text:
        parts = re.findall(r"\[([01, ]+)\](?:\*(\d{1,5}))?", text)
        each = [digit for digits, n in parts for digit in re.findall("[01]", digits) * int(n or 1)]
    rule = "a plan has dense layers in front alone, ([0]*N+[1]*M)"
    is_front = len(each) == layers and {*each} <= {"0", "1"} and each == sorted(each)
    require(is_front, "--moe-layer-freq", text, rule)
    return each.count("0")


def _activation(given: Given, gate: str) -> str:
    # their fused kernel has the tanh form
    is_exact = given.has("no_bias_gelu_fusion") or given.has("disable_bias_linear")
    if given.has("swiglu"):
        return "swiglu"
    if given.has("squared_relu"):
        return "squared-relu"
    if gate == "gelu" and not is_exact:
        return "gelu-tanh"
    return gate


def _positions(given: Given) -> str:
    word = given.get("position_embedding_type", str, "learned_absolute")
    require_known("--position-embedding-type", word, POSITIONS)
    if not given.has("use_rotary_position_embeddings"):
        return POSITIONS[word]
    rule = f"contradicts --position-embedding-type {word}: a model has one kind of positions"
    is_free = word not in ("alibi", "none")
    require(is_free, "--use-rotary-position-embeddings", "yes", rule)
    return "rotary"


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
    if tokens > 0 and given.all("tokenizer_type") == ["NullTokenizer"]:
        tokens += 1
    rule = "is not among the arguments; pass the padded size"
    require((vocab_size or tokens) > 0, "vocab_size", "missing", rule)
    tp = given.get("tensor_model_parallel_size", int, 1)
    step = given.get("make_vocab_size_divisible_by", int, 128)
    require(step > 0, "--make-vocab-size-divisible-by", step, "must be a whole number above zero")
    if vocab_size and vocab_size % tp == 0:
        return vocab_size
    return padded_vocab_size(vocab_size or tokens, tp, step)


def _topology(given: Given, is_fork: bool, gpus: int) -> Topology:
    sizes = given.fields(Topology, {"mbs": None, "gbs": 0})
    tp = sizes["tp"]
    pp = sizes["pp"]
    cp = sizes["cp"]
    product = f"tp x cp x pp = {tp} x {cp} x {pp}"
    ranks = tp * cp * pp
    is_multiple = min(tp, pp, cp) > 0 and gpus % ranks == 0
    require(is_multiple, "gpus", gpus, f"must be a multiple of {product}")
    dp = gpus // ranks
    precision = _precision(given)
    if is_fork:
        zero = int(given.get("zero_stage", float, 1.0))  # 1.0 in a log where it is not given
        if precision == "bf16" and zero == 0:
            zero = 1  # its pipeline then uses BF16_Optimizer, which shards its states over replicas
    else:
        zero = int(given.has("use_distributed_optimizer"))
    option = "num_layers_per_virtual_pipeline_stage"
    if given.has(option):
        layers = given.get("num_layers", int)
        each = pp * given.get(option, int)
        rule = f"x pp={pp} must divide num-layers={layers}"
        is_even = each > 0 and layers % each == 0
        require(is_even, option, each // pp, rule)
        sizes["interleaving"] = layers // each
    sizes["partition"] = _partition(given)
    if layout := given.get(LAYOUT, str, ""):
        for name in DEALT:
            rule = f"contradicts {name}={sizes[name]}"
            require(sizes[name] == getattr(Topology, name), LAYOUT, layout, rule)
        sizes |= layout_fields(layout, given.get("num_layers", int), pp)
    if not given.has("global_batch_size"):
        sizes["gbs"] = sizes["mbs"] * dp
    sizes["sequence_parallel"] &= tp > 1  # Megatron-LM drops it without tp, too
    if given.get("num_experts", int, 0) > 1:
        sizes["etp"] = given.get("expert_tensor_parallel_size", int, tp)
        word = given.get("moe_token_dispatcher_type", str, "allgather")
        if word == "flex":
            word = given.get("moe_flex_dispatcher_backend", str, "deepep")
        require_known("--moe-token-dispatcher-type", word, DISPATCHERS)
        sizes["dispatcher"] = word
    else:
        sizes["etp"] = 1
    instances = given.get("num_distributed_optimizer_instances", int, 1)
    shards, rest = divmod(dp * cp, max(instances, 1))
    rule = f"must divide dp x cp = {dp * cp}"
    require(instances > 0 and not rest, "--num-distributed-optimizer-instances", instances, rule)
    sums_in_fp32 = given.has("accumulate_allreduce_grads_in_fp32") or precision in ("bf16", "fp8")
    return Topology(
        **sizes,
        **_recompute(given, is_fork),
        dp=dp,
        zero=zero,
        shards=shards if instances > 1 else 0,
        offload="optimizer" if given.has("cpu_optimizer") else "none",
        precision=precision,
        fp32_gradients=sums_in_fp32 and precision != "fp32",
    )


def _recompute(given: Given, is_fork: bool) -> dict[str, Any]:
    if given.has("recompute_activations"):
        part = "selective"
    else:
        part = given.get("recompute_granularity", str, "none")
    if given.has("checkpoint_activations"):
        part = "full"
    if part == "full" and given.all("recompute_method") == ["block"] and not is_fork:
        return {"recompute": "block", "recompute_layers": given.get("recompute_num_layers", int)}
    return {"recompute": part}


def _precision(given: Given) -> str:
    """ "fp8" with either of Transformer Engine's formats: e4m3 for all, or hybrid, e5m2 for
    gradients.
    """
    if given.has("fp8_format"):
        word = given.get("fp8_format", str)
        require_known("--fp8-format", word, ("hybrid", "e4m3"))
        require(given.has("bf16"), "--fp8-format", word, "a plan has it with --bf16 alone")
        return "fp8"
    for name in ("fp16", "bf16"):
        if given.has(name):
            return name
    return "fp32"


def _partition(given: Given) -> str:
    embedding = given.has("account_for_embedding_in_pipeline_split")
    loss = given.has("account_for_loss_in_pipeline_split")
    option = "account-for-embedding-in-pipeline-split"
    require(embedding == loss, option, embedding, "a plan has both or neither")
    method = given.get("pp_partition_method", str, "type:transformer")
    if embedding:
        return "type:transformer|embedding"
    if method == "type:transformer":
        return "uniform"
    return method


def _run(given: Given, data: Data, gbs: int) -> Run:
    """Both programs count in samples or iterations; a plan's length is in iterations."""
    ramp = Ramp()
    if given.has("rampup_batch_size"):
        ramp = parse_ramp(",".join(given.all("rampup_batch_size")))
    if given.has("train_samples"):
        iterations = ramp.iterations(given.get("train_samples", int), gbs)
    else:
        iterations = given.get("train_iters", int)
    skipped: list[int] = []
    if words := given.all("iterations_to_skip"):
        skipped = parse_integers("--iterations-to-skip", ",".join(words))
    values = given.fields(Run, {"log_interval": 100, "eval_interval": 1000, "eval_iters": 100})
    # nothing is evaluated where no document or batch is left for it
    if not (data.shares[1] and values["eval_interval"] and values["eval_iters"]):
        values |= {"eval_interval": 0, "eval_iters": 0}
    return Run(
        train_iters=iterations,
        ramp=ramp,
        timers=given.get("timing_log_level", int, 0) > 0,
        skip=ranges({*skipped}).replace(" ", ""),
        **values,
    )


def _optimizer(given: Given, run: Run, gbs: int) -> Optimizer:
    """Warm-up and decay in samples, of iterations, or of Microsoft's Megatron-DeepSpeed in tokens;
    decay over the whole run, the programs' default, is 0 in a plan.
    """
    usual = {"lr": None, "min_lr": 0.0, "weight_decay": 0.01, "adam_beta2": 0.999}
    values = given.fields(Optimizer, usual | {"decay_style": "linear"})
    whole = run.ramp.consumed(run.train_iters, gbs)
    for name in ("warmup", "decay", "wsd_decay"):
        samples = gbs * given.get(f"lr_{name}_iters", int, 0)
        samples += given.get(f"lr_{name}_tokens", int, 0) // given.get("seq_length", int)
        values[f"{name}_samples"] = values[f"{name}_samples"] or samples
    decay = values["decay_samples"]
    if given.has("lr_warmup_fraction"):  # of the decay, as in both programs
        fraction = given.get("lr_warmup_fraction", float)
        values["warmup_samples"] = round(fraction * (decay or whole))
    values["decay_samples"] = 0 if decay == whole else decay
    return Optimizer(**values)


def _data(given: Given) -> Data:
    """Datasets by their prefixes; the tokenizer if it is a folder, else "bytes"."""
    given.read |= {"tokenizer_type", "vocab_size"}
    coder = given.get("tokenizer_name_or_path", str, "bytes")
    coder = given.get("tokenizer_model", str, coder)
    data = Data(tokenizer=coder, split="".join(given.all("split")) or DEFAULT_SPLIT)
    if data.shares[0] == 1:
        data = replace(data, split="")
    try:
        return replace(data, **_sources(given.all("data_path")))
    except ValueError:  # a form that a plan does not have: differing() names it
        return data


def _sources(words: list[str]) -> dict[str, Any]:
    """The data of PREFIX, or of WEIGHT PREFIX WEIGHT PREFIX ... Raises ValueError for others."""
    if len(words) == 1:
        return {"source": words[0]}
    pairs = zip(words[::2], words[1::2], strict=True)
    parts = tuple(Part(weight=float(weight), source=source) for weight, source in pairs)
    if len(parts) == 1:
        return {"source": parts[0].source}
    return {"source": "blend", "blend": parts}
