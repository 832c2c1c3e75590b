"""The plan that arguments of Megatron-LM or Megatron-DeepSpeed describe, and those that a plan cannot represent."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from trilane.config.batch_rampup import Ramp
from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.plan import BLEND, Data, Dropout, Optimizer, Part, Plan, Run
from trilane.interop.megatron_args import BYTES, DEEPSPEED, ENGINE_OF, LM
from trilane.utils.validation import DATA, read_json, require

T = TypeVar("T")


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


class _Given:
    """Arguments that record which of them were read."""

    def __init__(self, values: Mapping[str, list[str]]) -> None:
        self._values, self.read = values, set[str]()

    def has(self, name: str) -> bool:
        self.read.add(name)
        return name in self._values

    def all(self, name: str) -> list[str]:
        return self._values[name] if self.has(name) else []

    def get(self, name: str, kind: Callable[[str], T], default: T | None = None) -> T:
        """The value of `name`. Raises ValueError if it is missing without a `default`, or not of that kind."""
        values = self.all(name)
        if not values and default is not None:
            return default
        require(len(values) == 1, f"--{name.replace('_', '-')}", " ".join(values) or "missing", "needs one value")
        try:
            return kind(values[0])
        except ValueError:
            raise ValueError(f"--{name.replace('_', '-')}={values[0]}: must be a number") from None


def parse_plan(
    values: Mapping[str, list[str]], *, cluster: Cluster, gpus: int = 0, vocab_size: int = 0, label: str = "read"
) -> ParsedPlan:
    """The plan of the arguments. Raises ValueError if some are missing or contradict each other.

    `gpus` 0 takes the launcher's --nproc_per_node and --nnodes among them. `vocab_size` (padded) is needed if they name
    only a tokenizer.
    """
    given = _Given(values)
    flavour = DEEPSPEED if given.has("deepspeed") else LM
    topology = _topology(given, flavour, gpus or _gpus(given))
    optimizer, run = _optimizer_and_run(given, topology.gbs)
    plan = Plan(
        label=label,
        engine=ENGINE_OF[flavour],
        shape=_shape(given, vocab_size),
        cluster=cluster,
        topology=topology,
        data=_data(given),
        optimizer=optimizer,
        dropout=Dropout(
            hidden=given.get("hidden_dropout", float, 0.1), attention=given.get("attention_dropout", float, 0.1)
        ),
        run=run,
    )
    ignored, unknown = unread(set(values) - given.read)
    return ParsedPlan(plan=plan, ignored=ignored, unknown=unknown, differs=differing(values, plan))


def _gpus(given: _Given) -> int:
    require(given.has("nproc_per_node"), "gpus", "missing", "is not among the arguments; pass it")
    return given.get("nproc_per_node", int) * given.get("nnodes", int, 1)


def _shape(given: _Given, vocab_size: int) -> ModelShape:
    padded = [given.get(name, int) for name in ("padded_vocab_size", "pad_vocab_size_to") if given.has(name)]
    found = (padded or [vocab_size])[0]
    require(found > 0, "vocab_size", "missing", "is not among the arguments; pass the padded size")
    return ModelShape(
        num_layers=given.get("num_layers", int),
        hidden_size=given.get("hidden_size", int),
        num_attention_heads=given.get("num_attention_heads", int),
        seq_length=given.get("seq_length", int),
        vocab_size=found,
        tied_embeddings=not given.has("untie_embeddings_and_output_weights"),
        embedding_layernorm=given.has("embed_layernorm"),
    )


def _topology(given: _Given, flavour: str, gpus: int) -> Topology:
    tp, pp = given.get("tensor_model_parallel_size", int, 1), given.get("pipeline_model_parallel_size", int, 1)
    require(gpus % (tp * pp) == 0, "gpus", gpus, f"must be a multiple of tp x pp = {tp} x {pp}")
    mbs, dp = given.get("micro_batch_size", int), gpus // (tp * pp)
    precision = next((name for name in ("fp16", "bf16") if given.has(name)), "fp32")
    sums = given.has("accumulate_allreduce_grads_in_fp32") or precision == "bf16"
    embedding, loss = (given.has(f"account_for_{what}_in_pipeline_split") for what in ("embedding", "loss"))
    require(embedding == loss, "account-for-embedding-in-pipeline-split", embedding, "a plan has both or neither")
    method = given.get("pp_partition_method", str, "type:transformer")
    zero = given.get("zero_stage", int, 1) if flavour == DEEPSPEED else int(given.has("use_distributed_optimizer"))
    if flavour == DEEPSPEED and precision == "bf16" and zero == 0:
        zero = 1  # its pipeline then uses BF16_Optimizer, which shards its states over the replicas
    return Topology(
        tp=tp,
        pp=pp,
        dp=dp,
        mbs=mbs,
        gbs=given.get("global_batch_size", int, mbs * dp),
        zero=zero,
        recompute=_recompute(given),
        interleaving=_interleaving(given, pp),
        partition="type:transformer|embedding" if embedding else "uniform" if method == "type:transformer" else method,
        sequence_parallel=given.has("sequence_parallel"),
        offload="optimizer" if given.has("cpu_optimizer") else "none",
        precision=precision,
        first_stage_layers=given.get("decoder_first_pipeline_num_layers", int, 0),
        last_stage_layers=given.get("decoder_last_pipeline_num_layers", int, 0),
        overlap_grad_reduce=given.has("overlap_grad_reduce"),
        overlap_param_gather=given.has("overlap_param_gather"),
        fp32_gradients=sums and precision != "fp32",
    )


def _recompute(given: _Given) -> str:
    if given.has("checkpoint_activations"):
        return "full"
    return "selective" if given.has("recompute_activations") else given.get("recompute_granularity", str, "none")


def _interleaving(given: _Given, pp: int) -> int:
    """Model chunks per stage, from either of two arguments."""
    chunks = given.get("num_virtual_stages_per_pipeline_rank", int, 1)
    if not given.has("num_layers_per_virtual_pipeline_stage"):
        return chunks
    layers, each = given.get("num_layers", int), given.get("num_layers_per_virtual_pipeline_stage", int)
    rule = f"x pp={pp} must divide num-layers={layers}"
    require(layers % (each * pp) == 0, "num-layers-per-virtual-pipeline-stage", each, rule)
    return layers // (each * pp)


def _optimizer_and_run(given: _Given, gbs: int) -> tuple[Optimizer, Run]:
    """Both programs count in samples or iterations; a plan has warm-up and decay in samples, its length in iterations.

    Decay over the whole run, their default, is 0 in a plan.
    """
    ramp = Ramp()
    if given.has("rampup_batch_size"):
        start, increment, ramped = (int(word) for word in given.all("rampup_batch_size"))
        ramp = Ramp(start=start, increment=increment, samples=ramped)
    by_samples = given.has("train_samples")
    iterations = ramp.iterations(given.get("train_samples", int), gbs) if by_samples else given.get("train_iters", int)
    warmup = given.get("lr_warmup_samples", int, 0) or gbs * given.get("lr_warmup_iters", int, 0)
    decay = given.get("lr_decay_samples", int, 0) or gbs * given.get("lr_decay_iters", int, 0)
    whole = ramp.consumed(iterations, gbs)
    if given.has("lr_warmup_fraction"):  # of the decay, as in both programs
        warmup = round(given.get("lr_warmup_fraction", float) * (decay or whole))
    optimizer = Optimizer(
        lr=given.get("lr", float),
        warmup_samples=warmup,
        decay_samples=0 if decay == whole else decay,
        **{name: given.get(name, float, usual) for name, usual in USUAL.items()},
    )
    run = Run(
        train_iters=iterations,
        log_interval=given.get("log_interval", int, 100),
        seed=given.get("seed", int, 1234),
        ramp=ramp,
        timers=given.get("timing_log_level", int, 0) > 0,
        tensorboard=given.has("tensorboard_dir"),
    )
    return optimizer, run


def _data(given: _Given) -> Data:
    """Datasets by their prefixes; the tokenizer if it is a folder or NullTokenizer, else "bytes"."""
    coder = next((given.get(n, str) for n in ("tokenizer_model", "tokenizer_name_or_path") if given.has(n)), "bytes")
    given.read |= {"tokenizer_type", "vocab_size"}
    words = given.all("data_path")
    if len(words) < 2:
        return Data(source=words[0], tokenizer=coder) if words else Data(tokenizer=coder)
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        raise ValueError(f"--data-path={' '.join(words)}: must be WEIGHT PREFIX WEIGHT PREFIX ...") from None
    parts = zip(weights, words[1::2], strict=True)
    return Data(source=BLEND, tokenizer=coder, blend=tuple(Part(source=s, weight=w) for w, s in parts))


# The programs' defaults for the numbers of an Optimizer.
USUAL = {"min_lr": 0.0, "weight_decay": 0.01, "clip_grad": 1.0}
USUAL |= {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_eps": 1e-8}
ASSUMED = {"lr_decay_style": "linear"}  # the default of the programs

DERIVED = {"ffn_hidden_size", "kv_channels", "max_position_embeddings"}  # from the shape of a plan
TOKENIZERS = ("HuggingFaceTokenizer", "PretrainedFromHF")  # those in a folder


@functools.cache
def known_arguments() -> dict[str, Any]:
    """`one_way`: what a plan has in one way only, other values are listed in `differs`; `ignored`: what is irrelevant,
    such as where and how often files are written, kernels, workers, the launcher's arguments.
    """
    return read_json(DATA / "megatron_arguments.json", "arguments")


def differing(values: Mapping[str, list[str]], plan: Plan) -> tuple[str, ...]:
    """The values that the plan read from them has otherwise, as `name=value: a plan has ...`."""
    wanted: dict[str, Any] = known_arguments()["one_way"] | _derived(plan)
    given = {name: " ".join(values.get(name, [ASSUMED.get(name, str(value))])) for name, value in wanted.items()}
    found = [f"{n}={given[n]}: a plan has {value}" for n, value in wanted.items() if not _same(given[n], value)]
    coder = " ".join(values.get("tokenizer_type", ["its own"] if "vocab_file" in values else []))
    ours = coder == "NullTokenizer" and values.get("vocab_size") == [BYTES]
    if coder and coder not in TOKENIZERS and not ours:
        found.append(f"tokenizer_type={coder}: a plan has the tokenizer of a folder, or {plan.data.tokenizer}")
    if "data_path" not in values:
        found.append(f"data_path=missing: the plan has {plan.data.source}")
    return tuple(found)


def unread(names: set[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the names that were not read: those irrelevant to a plan, and those unknown."""
    rest, ignored = names - set(known_arguments()["one_way"]) - DERIVED, set(known_arguments()["ignored"])
    return tuple(sorted(rest & ignored)), tuple(sorted(rest - ignored))


def _derived(plan: Plan) -> dict[str, int]:
    h = plan.shape.hidden_size
    return dict(zip(sorted(DERIVED), (4 * h, plan.shape.head_dim, plan.shape.seq_length), strict=True))


def _same(text: str, value: Any) -> bool:
    try:
        return float(text) == float(value)
    except ValueError:
        return text == str(value)
