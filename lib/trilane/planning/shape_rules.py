"""What a good shape obeys on a card and a topology, and what breaking a rule costs."""

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology, invalid_reason
from trilane.costmodel.columns import columns_of
from trilane.costmodel.layers import TILES

SMALLEST_HEAD, LARGEST_HEAD = 64, 256  # published: 64 (GPT-2) to 224 (the prequel's 14336 / 64)
TILE = 128  # NVIDIA, 'Matrix multiplication background', tile quantization; the prequel: nhidden % 128 = 0
WAVE_LIMIT = 0.08  # share of SM time that incomplete waves may idle before a note says so: our choice
BALANCE = 0.5  # from this share of a layer on, an embedding wants a place of its own in the pipeline: our choice

# megatron/core/fusions/fused_softmax.py, is_kernel_available; CUDA's batch per block for more than 128 keys is 4
SOFTMAX_KEYS, SOFTMAX_BATCH = (16, 4096), 4


def broken_rules(shape: ModelShape, topology: Topology, cluster: Cluster) -> list[str]:
    """One line for every rule that the shape breaks on that topology and card; the first may be a refusal."""
    t, h = topology, shape.hidden_size
    impossible = invalid_reason(shape, t)
    notes = [impossible] if impossible else []
    if shape.head_dim % 8:
        rule = "must be a multiple of 8, or attention leaves the tensor cores (33 to 43 % slower in the chronicles)"
        notes.append(f"head_dim={shape.head_dim}: {rule}")
    softmax = softmax_note(shape, t) if t.attention == "scores" else ""
    notes += [softmax] if softmax else []
    if (h // t.tp) % TILE or h % TILE:
        notes.append(f"hidden_size={h}: {h} / tp {t.tp} should be a multiple of the {TILE}-wide tile")
    if shape.ffn != 4 * h and (shape.ffn % TILE or (shape.ffn // t.tp) % TILE):
        rule = f"{shape.ffn} / tp {t.tp} should be a multiple of the {TILE}-wide tile"
        notes.append(f"ffn_hidden_size={shape.ffn}: {rule}")
    if shape.kv_heads < t.tp:
        rule = f"should be a multiple of tp {t.tp}: GPUs use the same, and gather them"
        notes.append(f"num_key_value_heads={shape.kv_heads}: {rule}")
    lost = wave_loss(shape, t, cluster)
    if lost > WAVE_LIMIT:
        notes.append(f"mbs={t.mbs}: {lost:.0%} of the SMs' time goes to incomplete waves ({cluster.gpu.num_sms} SMs)")
    beside = shape.embedding_parameters / shape.layer_parameters
    if t.pp > 1 and t.partition == "uniform" and beside > BALANCE:
        notes.append(f"partition=uniform: the embedding is {beside:.1f} layers; count it (type:transformer|embedding)")
    return notes


def softmax_note(shape: ModelShape, topology: Topology) -> str:
    """Why Megatron's fused softmax kernel is not used, or "".

    16 < seq <= 4096, seq % 4 == 0, and heads / tp x mbs a multiple of the 4 rows that a block takes (8 up to 128
    keys). The prequel, 'NHEADs comparison': (HEADS/TP)*MBS % 4 = 0. Without it the scores pass memory in three steps.
    """
    s, each = shape.seq_length, SOFTMAX_BATCH * (2 if shape.seq_length <= 128 else 1)
    if not SOFTMAX_KEYS[0] < s <= SOFTMAX_KEYS[1] or s % 4:
        return f"seq_length={s}: the fused softmax takes multiples of 4 above {SOFTMAX_KEYS[0]} up to {SOFTMAX_KEYS[1]}"
    batches = shape.num_attention_heads * topology.mbs / topology.tp
    if batches % each:
        rule = f"heads / tp x mbs = {batches:g} must be a multiple of {each} for the fused softmax"
        return f"num_attention_heads={shape.num_attention_heads}: {rule}"
    return ""


def wave_loss(shape: ModelShape, topology: Topology, cluster: Cluster) -> float:
    """Share of the SMs' time that the forward weight matmuls leave idle in their last, incomplete wave of tiles.

    Of the tile shapes of costmodel.layers.TILES the least loss of each product, weighted by its FLOPs. NVIDIA, 'Matrix
    multiplication background', wave quantization. Left out: two tiles on one SM; what a kernel with split K does.
    """
    x, sms = columns_of(shape, topology), cluster.gpu.num_sms
    if cluster.gpu.kind == "cpu":
        return 0.0
    used = spent = 0.0
    for n, k in x.matrices:
        waves = [np.ceil(x.tokens / m) * np.ceil(n / w) / sms for m, w, _ in TILES]
        flops = 2.0 * x.tokens * n * k
        used += flops
        spent += flops * min(float(np.ceil(w) / w) for w in waves)
    return 1 - used / spent


def usable_heads(hidden: int, most_tp: int) -> list[int]:
    """Numbers of heads whose size is a multiple of 8 between the two limits and that `most_tp` ranks can share.

    The one whose head size is nearest to 128 comes first.
    """
    counts = [
        a for a in range(most_tp, hidden // SMALLEST_HEAD + 1, most_tp) if hidden % a == 0 and (hidden // a) % 8 == 0
    ]
    return sorted((a for a in counts if hidden // a <= LARGEST_HEAD), key=lambda a: (abs(hidden // a - 128), a))
