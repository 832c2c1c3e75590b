"""The chronicles' table of published models and of ideas for 200B, published.sizes(): as printed
and by formula.
"""

from trilane.config.model import ModelShape
from trilane.utils.tables import Columns
from trilane.utils.validation import shipped_json


def sizes() -> Columns:
    """Every published shape with its size.

    published.sizes()
    """
    names = (
        "origin",
        "layers",
        "hidden",
        "hidden / layers",
        "rows of embedding",
        "printed (B)",
        "by formula (B)",
    )
    rows = []
    for model in shipped_json("published")["models"]:
        s = ModelShape(**model["shape"])
        size = s.hidden_size // s.num_layers, s.vocab_size, model["printed_b"], s.parameters / 1e9
        rows.append((model["origin"], s.num_layers, s.hidden_size, *size))
    return Columns.of_rows(names, rows)
