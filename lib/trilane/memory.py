"""Bytes per GPU of every pipeline stage, by part."""

from dataclasses import dataclass, fields

from trilane.hardware import Cluster
from trilane.shape import ModelShape
from trilane.topology import Topology


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """What one GPU of a pipeline stage holds at its peak, in bytes."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    context: float

    @property
    def total(self) -> float:
        """Sum of the parts."""
        return sum(getattr(self, f.name) for f in fields(self))


def stage_layers(shape: ModelShape, topology: Topology) -> list[int]:
    """Transformer layers of each pipeline stage, first to last."""
    t = topology
    if t.partition == "uniform":
        return [shape.num_layers // t.pp] * t.pp
    per_stage = (shape.num_layers + 2) // t.pp
    if t.pp == 1:
        return [shape.num_layers]
    return [per_stage - 1, *[per_stage] * (t.pp - 2), per_stage - 1]


def stage_parameters(shape: ModelShape, topology: Topology) -> list[float]:
    """Parameters that one GPU of each stage holds; a tied embedding stands on the first and the last stage.

    Column- and row-parallel matrices are divided by tp; norms, position embeddings and the biases of row-parallel
    matrices are held by every GPU of a tensor-parallel group.
    """
    h, tp, pp = shape.hidden_size, topology.tp, topology.pp
    layer = (12 * h * h + 7 * h) / tp + 6 * h
    embedding = shape.embedding_parameters / tp
    parameters = [n * layer for n in stage_layers(shape, topology)]
    parameters[0] += embedding + shape.seq_length * h + 2 * h * shape.embedding_layernorm
    parameters[-1] += 2 * h + (embedding if pp > 1 or not shape.tied_embeddings else 0)
    return parameters


def activation_bytes_per_layer(shape: ModelShape, topology: Topology) -> float:
    """Bytes one GPU keeps for the backward pass, per layer and microbatch, 16-bit activations (twice that in fp32).

    s seq_length, b mbs, h hidden_size, a num_attention_heads, t tp:

        none, selective     s b h (10 + 24/t)        the core of attention is a fused kernel that stores no s x s scores
        + sequence parallel s b h (34/t)
        full                s b h 2                  only the layer's input

    Korthikanti et al. 2022, arXiv:2205.05198, Table 2.
    """
    s, b, h, t = shape.seq_length, topology.mbs, shape.hidden_size, topology.tp
    width = 2 if topology.precision == "fp32" else 1
    if topology.recompute == "full":
        return width * 2 * s * b * h
    return width * s * b * h * (34 / t if topology.sequence_parallel else 10 + 24 / t)


def memory_per_stage(shape: ModelShape, topology: Topology, cluster: Cluster) -> list[StageMemory]:
    """Peak memory of one GPU of each pipeline stage, first to last.

    States per parameter: fp32 4 + 4 + 8 bytes; 16-bit 2 + 4 + 12 (fp32 gradients, master weights and Adam's moments),
    ZeRO stage 1 divides the optimizer's part by dp, 2 the gradients too, 3 the weights too. In flight at stage i of p:
    min(m, p - i) microbatches (1F1B, the same paper). Left out: fragmentation and communication buffers.
    """
    t = topology
    weight, gradient, optimizer = (4, 4, 8) if t.precision == "fp32" else (2, 4, 12)
    layers, shard = stage_layers(shape, t), [t.dp if t.zero >= stage else 1 for stage in (3, 2, 1)]
    stages = []
    for i, parameters in enumerate(stage_parameters(shape, t)):
        in_flight = min(t.microbatches, t.pp - i)
        stages.append(
            StageMemory(
                weights=weight * parameters / shard[0],
                gradients=gradient * parameters / shard[1],
                optimizer=optimizer * parameters / shard[2],
                activations=in_flight * layers[i] * activation_bytes_per_layer(shape, t),
                # the logits, their fp32 copy and its gradient
                logits=(i == t.pp - 1) * 10 * t.mbs * shape.seq_length * shape.vocab_size / t.tp,
                context=cluster.gpu.context_bytes,
            )
        )
    return stages
