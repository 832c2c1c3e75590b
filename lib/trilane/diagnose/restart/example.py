"""A restart to look at: document 003's, made up from what it says, as fingerprints of TP 2 x PP 4 x DP 2.

There the weights of 384 ranks were dumped as text after the last step before a save and before the first step after the
load: the norm of the embedding on the last pipeline stage had come back at its defaults, and the tied embedding of that
stage was another, since its gradients had not been summed over both ends. The sizes, and that the norm had landed in
the group that decays (the document's later find), are put together here.
"""

import json
from pathlib import Path

import numpy as np

from trilane.workspace.fingerprints import Part, file_of, mark
from trilane.workspace.rank_grid import Place, regular

TP, PP, DP, HIDDEN, ROWS = 2, 4, 2, 64, 128
WORD, NORM = "embedding.word_embeddings.weight", "embedding.layernorm.weight"
ITERATION = 805
OPTIMIZER = {"clip_grad": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1}
Tensors = dict[str, np.ndarray]


def write_example(folder: Path) -> tuple[Path, Path]:
    """Folders of fingerprints before the save and after the load, made where they are not there yet."""
    before, after = folder / f"save_{ITERATION}", folder / f"load_{ITERATION}"
    for place, loaded in ((before, False), (after, True)):
        if not place.exists():
            place.mkdir(parents=True)
            for rank in regular(TP, PP, DP, 8).places:
                text = json.dumps(_fingerprint(rank, loaded))
                (place / file_of(rank.rank)).write_text(text + "\n", encoding="utf-8")
    return before, after


def _tensors(stage: int, loaded: bool) -> Tensors:
    """What a stage holds: a matrix of its layer, and at both ends the embedding and its norm."""
    random = np.random.default_rng(stage)
    held = {f"decoder.layers.{stage}.mlp.linear_fc1.bias": 0.01 * random.normal(size=HIDDEN)}
    if stage in (0, PP - 1):
        first = 0.02 * np.random.default_rng(99).normal(size=(ROWS, HIDDEN))
        # The last stage went its own way until the load gave it the first stage's.
        own = first + 2e-3 * random.normal(size=first.shape) if stage and not loaded else first
        norm = np.ones(HIDDEN) if stage and loaded else np.full(HIDDEN, 0.9961)
        held |= {WORD: own, NORM: norm}
    return {name: tensor.astype(np.float32) for name, tensor in held.items()}


def _fingerprint(place: Place, loaded: bool) -> dict[str, object]:
    parts = []
    for name, whole in _tensors(place.pp, loaded).items():
        box = [(0, n) for n in whole.shape]
        if name != NORM:
            each = whole.shape[0] // TP
            box[0] = (each * place.tp, each * (place.tp + 1))
        own = whole[box[0][0] : box[0][1]]
        decay = 0.0 if name.endswith(".bias") else 0.1
        marks = {"weight": mark(own, box)}  # the document dumped no moments
        parts.append(Part(name=name, shape=whole.shape, box=tuple(box), decay=decay, marks=marks).to_json())
    return {
        **{axis: getattr(place, axis) for axis in ("rank", "tp", "pp", "dp")},
        **{"iteration": ITERATION, "consumed_samples": 384 * ITERATION, "precision": "bf16", "next_lr": 6e-5},
        **{"layout": ["document 003", TP, PP, DP, 1], "world": TP * PP * DP},
        **{"shape": {"hidden_size": HIDDEN, "vocab_size": ROWS}, "optimizer": OPTIMIZER, "scalars": {"step": 805.0}},
        **{"samples": None, "generators": {}, "parts": parts},
    }
