"""What a good shape obeys on a card and a topology, and what breaking a rule costs."""

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology, invalid_reason
from trilane.costmodel.columns import columns_of
from trilane.costmodel.layers import TILES

TILE = 128  # NVIDIA, 'Matrix multiplication background', tile quantization; the prequel: nhidden % 128 = 0


def broken_rules(shape: ModelShape, topology: Topology, cluster: Cluster) -> list[str]:
    """One line for every rule that the shape breaks on that topology and card; the first may be a refusal."""
    t, h, ffn, lost = topology, shape.hidden_size, shape.ffn, wave_loss(shape, topology, cluster)
    beside = shape.embedding_parameters / shape.layer_parameters
    notes = {
        invalid_reason(shape, t): True,
        f"head_dim={shape.head_dim}: must be a multiple of 8, or attention leaves the tensor cores (33 to 43 % slower "
        "in the chronicles)": shape.head_dim % 8,
        softmax_note(shape, t): t.attention == "scores",
        f"hidden_size={h}: {h} / tp {t.tp} should be a multiple of the {TILE}-wide tile": (h // t.tp) % TILE
        or h % TILE,
        f"ffn_hidden_size={ffn}: {ffn} / tp {t.tp} should be a multiple of the {TILE}-wide tile": ffn != 4 * h
        and (ffn % TILE or (ffn // t.tp) % TILE),
        f"num_key_value_heads={shape.kv_heads}: should be a multiple of tp {t.tp}: GPUs use the same, and gather "
        "them": shape.kv_heads < t.tp,
        # the share that a note is worth, here and for the embedding's half of a layer: our choice
        f"mbs={t.mbs}: {lost:.0%} of the SMs' time goes to incomplete waves ({cluster.gpu.num_sms} SMs)": lost > 0.08,
        f"partition=uniform: the embedding is {beside:.1f} layers; count it (type:transformer|embedding)": t.pp > 1
        and t.partition == "uniform"
        and beside > 0.5,
    }
    return [note for note, is_broken in notes.items() if note and is_broken]


def softmax_note(shape: ModelShape, topology: Topology) -> str:
    """Why Megatron's fused softmax kernel is not used, or ""; without it the scores pass memory in three steps.

    16 < seq <= 4096, seq % 4 == 0, and heads / tp x mbs a multiple of the 4 rows that a block takes (8 up to 128 keys):
    megatron/core/fusions/fused_softmax.py, is_kernel_available; the prequel, 'NHEADs comparison'.
    """
    s, each = shape.seq_length, 8 if shape.seq_length <= 128 else 4
    if not 16 < s <= 4096 or s % 4:
        return f"seq_length={s}: the fused softmax takes multiples of 4 above 16 up to 4096"
    batches = shape.num_attention_heads * topology.mbs / topology.tp
    rule = f"heads / tp x mbs = {batches:g} must be a multiple of {each} for the fused softmax"
    return f"num_attention_heads={shape.num_attention_heads}: {rule}" if batches % each else ""


def wave_loss(shape: ModelShape, topology: Topology, cluster: Cluster) -> float:
    """Share of the SMs' time that the forward weight matmuls leave idle in their last, incomplete wave of tiles.

    Of the tile shapes of costmodel.layers.TILES the least loss of each product, weighted by its FLOPs. NVIDIA, 'Matrix
    multiplication background', wave quantization. Left out: two tiles on one SM; what a kernel with split K does.
    """
    x, used, spent = columns_of(shape, topology), 0.0, 0.0
    if cluster.gpu.kind == "cpu":
        return 0.0
    for n, k in x.matrices:
        waves = [np.ceil(x.tokens / m) * np.ceil(n / w) / cluster.gpu.num_sms for m, w, _ in TILES]
        used += n * k
        spent += n * k * min(float(np.ceil(w) / w) for w in waves)
    return 1 - used / spent


def usable_heads(hidden: int, most_tp: int) -> list[int]:
    """Numbers of heads whose size is a multiple of 8 from 64 (GPT-2) to 256, and that `most_tp` ranks can share.

    The one whose head size is nearest to 128 comes first. Published are sizes up to 224 (the prequel's 14336 / 64).
    """
    counts = (a for a in range(most_tp, hidden // 64 + 1, most_tp) if hidden % (8 * a) == 0 and hidden // a <= 256)
    return sorted(counts, key=lambda a: (abs(hidden // a - 128), a))
