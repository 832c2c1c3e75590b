"""Columns: one plan, or a million, as numbers that every prediction formula takes alike."""

from functools import cached_property, reduce
from typing import Any, NamedTuple

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.engines import sums_in_fp32
from trilane.config.model import ModelShape
from trilane.config.parallelism import CHOICES, Topology
from trilane.costmodel.constants import Constants, card_facts

FP32, FP16, BF16, FP8, FP4 = range(5)  # places of CHOICES["precision"]
NONE, SELECTIVE, FULL, OPERATORS, BLOCK = range(5)  # places of CHOICES["recompute"]
ALLTOALL, ALLGATHER, DEEPEP, HYBRIDEP = range(4)  # places of CHOICES["dispatcher"]
Number = Any  # a float or a numpy array; arrays in one Columns broadcast against each other


class Parts:
    """Base of a dataclass whose fields, numbers or arrays, are parts of a whole."""

    @property
    def total(self) -> Number:
        """Sum of the parts."""
        return sum(vars(self).values())


class Columns:
    """Sizes of models and topologies by name, each a number or an array; see columns_of().

    The fields of a topology have their names there, and a word is a number, its place among the
    choices: `recompute` 0 none, 1 selective, 2 full, 3 operators, 4 block. `biases` 0 none, 1 of
    queries, keys and values, 2 all; `norm_values` 2 h or h parameters of a norm; `inner_values`
    what else of a layer tp does not divide (ModelShape.inner_parameters); `positions` learned rows;
    `alibi` whether attention adds ALiBi's mask; `shared` channels inside all shared experts. What
    is of a layer is of one with experts, where there are some; see dense().
    """

    def __init__(self, **numbers: Number) -> None:
        self.numbers = numbers
        vars(self).update(numbers)

    def __getattr__(self, name: str) -> Number:  # also tells mypy that there are such names
        raise AttributeError(name)

    def changed(self, **numbers: Number) -> "Columns":
        """With other numbers for some names."""
        return Columns(**{**self.numbers, **numbers})

    def dense(self) -> "Columns":
        """With the layers that stand in front of those with experts."""
        return self.changed(experts=0)

    def expert_group(self) -> "Columns":
        """With the ranks that hold other experts as tensor-parallel ones, and those that hold the
        same as replicas.
        """
        held = self.ep * self.etp
        replicas = self.tp * self.replicas / held
        mbs = self.mbs * self.dp / replicas  # as many microbatches
        shards = replicas * self.shards / self.replicas  # in as many groups
        return self.changed(tp=held, cp=1, dp=replicas, mbs=mbs, shards=shards)

    @property
    def value_bytes(self) -> Number:
        """Bytes of a weight or an activation."""
        return 2 + 2 * (self.precision == FP32)

    @property
    def microbatches(self) -> Number:
        """Microbatches per iteration and replica."""
        return self.gbs / (self.mbs * self.dp)

    @property
    def gpus(self) -> Number:
        return self.tp * self.replicas * self.pp

    @property
    def replicas(self) -> Number:
        """Ranks that sum gradients: replicas, times the ranks that share a sequence."""
        return self.dp * self.cp

    @property
    def sharded(self) -> Number:
        """Ranks among which ZeRO divides states: all replicas, or the group of hybrid sharding."""
        return np.where(self.shards > 0, self.shards, self.replicas)

    @property
    def recomputed(self) -> Number:
        """Share of a stage's layers that are computed again as a whole, that of the longest."""
        is_full = self.recompute == FULL
        if not np.any(self.recompute_layers):
            return is_full
        layers = self.recompute_layers * self.interleaving
        block = np.minimum(layers / np.maximum(self.most_layers, 1), 1)
        return np.where(self.recompute == BLOCK, block, is_full)

    @property
    def tokens(self) -> Number:
        """Tokens of a microbatch on one GPU."""
        return self.mbs * self.seq / self.cp

    @property
    def input_bytes(self) -> Number:
        """Bytes of a GPU's part of a layer's input in host memory, where tp ranks share it out, by
        sequence parallelism or DeepSpeed's partition_activations.
        """
        return self.tokens * self.hidden * self.value_bytes / self.tp

    @property
    def query_hidden(self) -> Number:
        """Channels of all queries."""
        return self.heads * self.head_dim

    @property
    def kv_hidden(self) -> Number:
        """Channels of all keys (or values) on the ranks of a tensor-parallel group, which use a
        head each at least.
        """
        return np.maximum(self.kv_heads, self.tp) * self.head_dim

    @property
    def mlp(self) -> Number:
        """Channels inside the MLP that every token goes through."""
        return np.where(self.experts > 0, self.shared, self.ffn)

    @property
    def copies(self) -> Number:
        """Copies of tokens that one GPU sends to experts in a layer, of a microbatch."""
        return self.tokens * self.top_k / self.tp

    @property
    def expert_matrices(self) -> tuple[tuple[Number, Number], ...]:
        """Outputs and inputs of an expert's matrices on one GPU."""
        f = self.expert_ffn / self.etp
        return ((1 + self.gated) * f, self.hidden), (self.hidden, f)

    @cached_property
    def expert_parameters(self) -> Number:
        """Parameters of the experts of one layer on one GPU."""
        each = sum(
            outputs * (inputs + (self.biases == 2)) for outputs, inputs in self.expert_matrices
        )
        return self.experts / self.ep * each

    @property
    def matrices(self) -> tuple[tuple[Number, Number], ...]:
        """Outputs and inputs of a layer's matrices on one GPU: queries, keys and values;
        projection; MLP in and out, or those of the shared experts.

        With fewer heads of keys than ranks megatron-core 0.16.1 cuts their rows too, and gathers
        what they make.
        """
        h = self.hidden
        f = self.mlp
        t = self.tp
        return (
            ((self.query_hidden + 2 * self.kv_heads * self.head_dim) / t, h),
            (h, self.query_hidden / t),
            ((1 + self.gated) * f / t, h),
            (h, f / t),
        )

    @cached_property
    def layer_weights(self) -> Number:
        """Entries of a layer's matrices on one GPU."""
        return sum(outputs * inputs for outputs, inputs in self.matrices)

    @cached_property
    def layer_parameters(self) -> Number:
        """Parameters of one layer on one GPU, but for its experts; tp divides all but norms, the
        router and the biases of row-parallel matrices.
        """
        qkv, _, mlp, _ = (outputs for outputs, _ in self.matrices)
        biases = (self.biases > 0) * qkv + (self.biases == 2) * (mlp + 2 * self.hidden)
        router = self.hidden * (self.experts + (self.experts > 0) * self.shared_gate)
        return self.layer_weights + biases + 2 * self.norm_values + self.inner_values + router

    @property
    def embedding_parameters(self) -> Number:
        """Parameters of the word embedding on one GPU."""
        return self.vocab * self.hidden / self.tp

    @cached_property
    def stage_layers(self) -> tuple[Number, Number, Number]:
        """Transformer layers of the first, of a middle and of the last pipeline stage.

        Layers are dealt in stages of ceil(units / pp), and the last stage gets what is left:
        DeepSpeed's greedy balance gives 78 layers on 12 stages as 11 x 7 + 1 (BigScience
        chronicles, 'Re-do'). A first or last stage with a number of its own stands apart, and the
        others share the rest.
        """
        own_first = self.first_stage_layers
        own_last = self.last_stage_layers
        units = self.layers + 2 * self.partition - own_first - own_last
        others = self.pp - 1 * (own_first > 0) - (own_last > 0)
        each = np.ceil(units / np.maximum(others, 1))
        first = np.where(own_first > 0, own_first, np.minimum(each, units) - self.partition)
        rest = np.maximum(units - each * (others - 1) - self.partition, 0)
        last = np.where(own_last > 0, own_last, rest)
        alone = self.pp == 1
        return np.where(alone, self.layers, first), each, np.where(alone, self.layers, last)

    @property
    def most_layers(self) -> Number:
        """Layers of the longest stage: two with numbers of their own have none in the middle."""
        return reduce(np.maximum, self.stage_layers)

    @property
    def bucket_values(self) -> Number:
        """Values in one of ZeRO's buckets: one layer's matrices, and never more than DeepSpeed's
        own size.

        Stage 3: h^2, as Hugging Face's Trainer fills in "auto" (its page on DeepSpeed).
        """
        # the default of reduce_bucket_size, in values (DeepSpeed's configuration page)
        library = 500_000_000
        layer = np.minimum(library, self.layer_weights * self.tp)
        fitted = np.where(self.zero == 3, self.hidden * self.hidden, layer)
        return np.where(self.buckets == 1, library, fitted)

    def take(self, index: Any) -> "Columns":
        """The chosen rows; what is the same for all rows stays a number."""
        return Columns(**{n: v[index] if np.ndim(v) else v for n, v in self.numbers.items()})


def columns_of(shape: ModelShape, topology: Topology, engine: str = "") -> Columns:
    """One plan as numbers; `engine` "" is Megatron-DeepSpeed as the documents used it."""
    numbers = {name: number_of(name, value) for name, value in vars(topology).items()}
    if engine:
        numbers["fp32_gradients"] = int(sums_in_fp32(engine, topology))
    elif topology.zero == 3:
        numbers["overlap_grad_reduce"] = 1  # as FSDP and DeepSpeed's default do
    return Columns(
        layers=shape.num_layers,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        head_dim=shape.head_dim,
        seq=shape.seq_length,
        vocab=shape.vocab_size,
        untied=int(not shape.tied_embeddings),
        embedding_layernorm=int(shape.embedding_layernorm),
        kv_heads=shape.kv_heads,
        ffn=shape.ffn,
        gated=int(shape.is_gated),
        biases=("none", "qkv", "all").index(shape.biases),
        norm_values=shape.norm_parameters,
        inner_values=shape.inner_parameters,
        qk_layernorm=int(shape.qk_layernorm),
        positions=shape.seq_length if shape.positions == "learned" else 0,
        alibi=int(shape.positions == "alibi"),
        experts=shape.experts,
        top_k=shape.top_k,
        expert_ffn=shape.expert_ffn,
        shared=shape.shared_channels,
        shared_gate=int(shape.shared_gate),
        first_dense=shape.first_dense,
        **numbers,
    )


def number_of(name: str, value: Any) -> int:
    """The value of a topology's field in Columns."""
    if name in CHOICES:
        return CHOICES[name].index(value)
    return int(value)


class Setting(NamedTuple):
    """What every formula of time takes: the plans' sizes, where they run, and the constants."""

    columns: Columns
    cluster: Cluster
    constants: Constants


def linear_flops_per_s(setting: Setting) -> Number:
    """Peak rate of a linear layer's matmuls: that of 8 or 4 bits where they have so few, times the
    share of it that they reach, over that of 16 bits (data/cards.json).
    """
    x, cluster, _ = setting
    gpu = cluster.gpu
    facts = card_facts(gpu)
    rate = matmul_flops_per_s(setting)
    rate = np.where(x.precision == FP8, gpu.fp8_flops_per_s * facts["fp8"][0], rate)
    return np.where(x.precision == FP4, gpu.fp4_flops_per_s * facts["fp4"][0], rate)


def matmul_flops_per_s(setting: Setting) -> Number:
    """Peak rate of attention's matmuls: the card's in 16 or 32 bits, or a process's share of a CPU
    machine's cores.
    """
    x, cluster, _ = setting
    gpu = cluster.gpu
    half = max(gpu.fp16_flops_per_s, gpu.bf16_flops_per_s) or gpu.fp32_flops_per_s
    if gpu.kind == "cpu":
        threads = np.maximum(cluster.cores_per_node // x.gpus, 1)
        return gpu.fp32_flops_per_s * threads / slowdown(setting)
    return np.where(x.precision == FP32, gpu.fp32_flops_per_s, half)


def slowdown(setting: Setting) -> Number:
    """How many processes of a CPU machine wait for one core; 1 on GPUs."""
    x, cluster, _ = setting
    if cluster.gpu.kind != "cpu":
        return 1.0
    return np.maximum(x.gpus / cluster.cores_per_node, 1.0)


def memory_seconds(bytes_: Number, setting: Setting) -> Number:
    """Seconds in which element-wise kernels move so many bytes."""
    _, cluster, c = setting
    rate = cluster.gpu.memory_bytes_per_s * c.memory
    return bytes_ * slowdown(setting) / rate
