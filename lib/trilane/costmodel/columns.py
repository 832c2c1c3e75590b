"""Columns: one plan, or a million, as numbers that every prediction formula takes alike."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.engines import sums_in_fp32
from trilane.config.model import ModelShape
from trilane.config.parallelism import CHOICES, Topology

# DeepSpeed's default size of a reduce or all-gather bucket, in values (its configuration page, reduce_bucket_size).
LIBRARY_BUCKET = 500_000_000
# Share of the peak that an 8-bit matmul reaches, relative to bf16's share: the best on an H100 SXM are 1402.6 of 1979
# and 794.5 of 989 TFLOP/s (S. Bekman, 'Machine Learning Engineering', table of maximum achievable matmul FLOPS).
FP8_SHARE = 0.88
# Numbers that a Topology has by the same names.
SAME = ("tp", "cp", "pp", "dp", "mbs", "gbs", "zero", "interleaving", "first_stage_layers", "last_stage_layers")
Number = Any  # a float or a numpy array; arrays in one Columns broadcast against each other


class Parts:
    """Base of a dataclass whose fields, numbers or arrays, are parts of a whole."""

    @property
    def total(self) -> Number:
        """Sum of the parts."""
        return sum(vars(self).values())


@dataclass(frozen=True, kw_only=True)
class Columns:
    """Sizes of models and topologies, each a number or an array.

    Choices are numbers too: `recompute` 0 none, 1 selective, 2 full; `embedding_layers` 1 where the pipeline counts
    embedding and head as a layer each; `stores_scores` 1 where attention keeps its s x s scores (no flash kernel);
    `offload` 0 none, 1 optimizer, 2 optimizer and parameters; `fp32_gradients` 1 where they are accumulated in fp32;
    `library_buckets` 1 where ZeRO's buckets have DeepSpeed's own size; `main_grads` 1 where the engine is Megatron's
    own, whose fp32 gradients are the only ones and stay whole; `gated` 1 where the MLP has a gate; `biases` 0 none, 1
    of queries, keys and values, 2 all; `norm_values` 2 h or h parameters of a norm; `positions` learned rows;
    `fp8` 1 where linear layers multiply in 8 bits.
    """

    layers: Number
    hidden: Number
    heads: Number
    seq: Number
    vocab: Number
    tp: Number
    pp: Number
    dp: Number
    mbs: Number
    gbs: Number
    zero: Number
    recompute: Number
    interleaving: Number
    embedding_layers: Number
    sequence_parallel: Number
    offload: Number
    value_bytes: Number
    fp32_gradients: Number
    stores_scores: Number
    torch_adam: Number
    untied: Number
    embedding_layernorm: Number
    kv_heads: Number
    ffn: Number
    gated: Number
    biases: Number
    norm_values: Number
    positions: Number
    cp: Number = 1
    fp8: Number = 0
    first_stage_layers: Number = 0  # 0: as many as the others
    last_stage_layers: Number = 0
    library_buckets: Number = 0
    main_grads: Number = 0

    @property
    def microbatches(self) -> Number:
        """Microbatches per iteration and replica."""
        return self.gbs / (self.mbs * self.dp)

    @property
    def gpus(self) -> Number:
        return self.tp * self.replicas * self.pp

    @property
    def replicas(self) -> Number:
        """Ranks among which gradients are summed and ZeRO divides: replicas, times the ranks that share a sequence."""
        return self.dp * self.cp

    @property
    def tokens(self) -> Number:
        """Tokens of a microbatch on one GPU."""
        return self.mbs * self.seq / self.cp

    @property
    def head_dim(self) -> Number:
        return self.hidden / self.heads

    @property
    def kv_hidden(self) -> Number:
        """Channels of all keys (or values) on the ranks of a tensor-parallel group, which use a head each at least."""
        return np.maximum(self.kv_heads, self.tp) * self.head_dim

    @property
    def matrices(self) -> tuple[tuple[Number, Number], ...]:
        """Outputs and inputs of a layer's matrices on one GPU: queries, keys and values; projection; MLP in and out.

        With fewer heads of keys than ranks megatron-core 0.16.1 cuts their rows too, and gathers what they make.
        """
        h, f, t = self.hidden, self.ffn, self.tp
        return ((h + 2 * self.kv_heads * self.head_dim) / t, h), (h, h / t), ((1 + self.gated) * f / t, h), (h, f / t)

    @property
    def layer_weights(self) -> Number:
        """Entries of a layer's matrices on one GPU."""
        return sum(outputs * inputs for outputs, inputs in self.matrices)

    @property
    def layer_parameters(self) -> Number:
        """Parameters of one layer on one GPU; tp divides all but norms and the biases of row-parallel matrices."""
        qkv, _, mlp, _ = (outputs for outputs, _ in self.matrices)
        every = np.equal(self.biases, 2)
        biases = np.greater(self.biases, 0) * qkv + every * (mlp + 2 * self.hidden)
        return self.layer_weights + biases + 2 * self.norm_values

    @property
    def embedding_parameters(self) -> Number:
        """Parameters of the word embedding on one GPU."""
        return self.vocab * self.hidden / self.tp

    @property
    def stage_layers(self) -> tuple[Number, Number, Number]:
        """Transformer layers of the first, of a middle and of the last pipeline stage.

        Layers are dealt in stages of ceil(units / pp), and the last stage gets what is left: DeepSpeed's greedy balance
        gives 78 layers on 12 stages as 11 x 7 + 1 (BigScience chronicles, 'Re-do').
        A first or last stage with a number of its own stands apart, and the others share the rest.
        """
        own_first, own_last = self.first_stage_layers, self.last_stage_layers
        units = self.layers + 2 * self.embedding_layers - own_first - own_last
        others = self.pp - np.greater(own_first, 0) - np.greater(own_last, 0)
        each = np.ceil(units / np.maximum(others, 1))
        first = np.where(np.greater(own_first, 0), own_first, np.minimum(each, units) - self.embedding_layers)
        rest = np.maximum(units - each * (others - 1) - self.embedding_layers, 0)
        last = np.where(np.greater(own_last, 0), own_last, rest)
        alone = self.pp == 1
        return np.where(alone, self.layers, first), each, np.where(alone, self.layers, last)

    @property
    def bucket_values(self) -> Number:
        """Values in one of ZeRO's buckets: one layer's matrices, and never more than DeepSpeed's own size.

        Stage 3: h^2, as Hugging Face's Trainer fills in "auto" (its page on DeepSpeed).
        """
        h2 = self.hidden * self.hidden
        fitted = np.where(np.equal(self.zero, 3), h2, np.minimum(LIBRARY_BUCKET, self.layer_weights * self.tp))
        return np.where(np.equal(self.library_buckets, 1), LIBRARY_BUCKET, fitted)

    def take(self, index: Any) -> "Columns":
        """The chosen rows; what is the same for all rows stays a number."""
        return Columns(**{f.name: v[index] if np.ndim(v := getattr(self, f.name)) else v for f in fields(self)})


def columns_of(shape: ModelShape, topology: Topology, engine: str = "") -> Columns:
    """One plan as Columns of numbers; `engine` "" is Megatron-DeepSpeed as the documents used it."""
    t = topology
    return Columns(
        layers=shape.num_layers,
        hidden=shape.hidden_size,
        heads=shape.num_attention_heads,
        seq=shape.seq_length,
        vocab=shape.vocab_size,
        **{name: getattr(t, name) for name in SAME},
        recompute=CHOICES["recompute"].index(t.recompute),
        embedding_layers=int(t.partition != "uniform"),
        sequence_parallel=int(t.sequence_parallel),
        offload=CHOICES["offload"].index(t.offload),
        value_bytes=4 if t.precision == "fp32" else 2,
        fp32_gradients=int(sums_in_fp32(engine, t)) if engine else int(t.fp32_gradients),
        stores_scores=int(t.attention == "scores"),
        torch_adam=int(t.adam == "torch"),
        untied=int(not shape.tied_embeddings),
        embedding_layernorm=int(shape.embedding_layernorm),
        kv_heads=shape.kv_heads,
        ffn=shape.ffn,
        gated=int(shape.is_gated),
        biases=("none", "qkv", "all").index(shape.biases),
        norm_values=shape.norm_parameters,
        positions=shape.seq_length if shape.positions == "learned" else 0,
        fp8=int(t.precision == "fp8"),
        library_buckets=int(t.buckets == "library"),
        main_grads=int(engine == "megatron" and t.precision != "fp32"),
    )


def stack(rows: Sequence[Columns]) -> Columns:
    """Several plans as Columns of arrays."""
    return Columns(**{f.name: np.array([getattr(r, f.name) for r in rows], float) for f in fields(Columns)})


def linear_flops_per_s(columns: Columns, cluster: Cluster) -> Number:
    """Peak rate of a linear layer's matmuls: that of 8 bits where they have 8."""
    wide = matmul_flops_per_s(columns, cluster)
    return (
        np.where(np.equal(columns.fp8, 1), cluster.gpu.fp8_flops_per_s * FP8_SHARE, wide)
        if cluster.gpu.kind == "cuda"
        else wide
    )


def matmul_flops_per_s(columns: Columns, cluster: Cluster) -> Number:
    """Peak rate of attention's matmuls: the card's in 16 or 32 bits, or a process's share of a CPU machine's cores."""
    gpu = cluster.gpu
    half = max(gpu.fp16_flops_per_s, gpu.bf16_flops_per_s) or gpu.fp32_flops_per_s
    if gpu.kind == "cpu":
        threads = np.maximum(cluster.cores_per_node // columns.gpus, 1)
        return gpu.fp32_flops_per_s * threads / slowdown(columns, cluster)
    return np.where(np.equal(columns.value_bytes, 4), gpu.fp32_flops_per_s, half)


def slowdown(columns: Columns, cluster: Cluster) -> Number:
    """How many processes of a CPU machine wait for one core; 1 on GPUs."""
    return np.maximum(columns.gpus / cluster.cores_per_node, 1.0) if cluster.gpu.kind == "cpu" else 1.0
