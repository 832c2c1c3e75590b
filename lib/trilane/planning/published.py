"""The planning table of the chronicles: published models, their ideas for 200B, and what these take on one GPU.

published.sizes()
"""

from dataclasses import dataclass

from trilane.config.model import ModelShape
from trilane.utils.tables import Columns
from trilane.utils.validation import DATA, from_mapping, read_json


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model of the 200B planning table: who, its shape, the size as printed, and the TP x PP of one replica."""

    origin: str
    shape: ModelShape
    printed_b: int
    tp: int = 8
    pp: int = 1


def models(table: str) -> list[PlannedModel]:
    """The prequel's shapes: `published`, whose size it prints, or `planned`, with the TP x PP of a replica."""
    return [from_mapping(PlannedModel, model, "model") for model in read_json(DATA / "published.json", "file")[table]]


def sizes() -> Columns:
    """Every published shape with its size as printed and by formula.

    published.sizes()
    """
    names = ("origin", "layers", "hidden", "hidden / layers", "rows of embedding", "printed (B)", "by formula (B)")
    rows = []
    for m in models("published"):
        s, ratio = m.shape, m.shape.hidden_size // m.shape.num_layers
        size = m.printed_b, s.parameters / 1e9
        rows.append((m.origin, s.num_layers, s.hidden_size, ratio, f"{s.vocab_size:,}", *size))
    return Columns.of_rows(names, rows, digits=2)


def states() -> Columns:
    """What embedding and layers of the planned models take on one GPU."""
    names = ("model", "B", "layers", "hidden", "TP", "PP", "GPUs", "embedding (GB)", "layer (GB)", "layers a stage")
    rows = []
    for m in models("planned"):
        # bytes a parameter: fp16 weights 2, gradients 4, fp32 masters 4, Adam's moments 8 (BigScience chronicles)
        s, each = m.shape, 18 / m.tp / 1e9
        embedding, layer, stage = s.embedding_parameters * each, s.layer_parameters * each, s.num_layers / m.pp
        shape = (m.origin, round(s.parameters / 1e9), s.num_layers, s.hidden_size, m.tp, m.pp, m.tp * m.pp)
        stages = round(stage, 1), round(stage * layer, 1), round(stage * layer + embedding, 1)
        rows.append((*shape, round(embedding, 2), round(layer, 2), *stages))
    return Columns.of_rows((*names, "middle stage (GB)", "first stage (GB)"), rows)
