"""The planning table of the chronicles: published models, their ideas for 200B, and what these take on one GPU."""

from dataclasses import dataclass
from typing import Any

from trilane.config.model import ModelShape
from trilane.utils.tables import Columns, Html
from trilane.utils.validation import DATA, from_mapping, read_json

STATE_BYTES_PER_PARAMETER = 18  # fp16 weights 2, gradients 4, fp32 masters 4, Adam's moments 8: BigScience chronicles


@dataclass(frozen=True, kw_only=True)
class PlannedModel:
    """A model of the 200B planning table: who, its shape, the size as printed, and the TP x PP of one replica."""

    origin: str
    shape: ModelShape
    printed_b: int
    tp: int = 8
    pp: int = 1

    @property
    def ratio(self) -> int:
        """Hidden size over layers, cut to a whole number as the chronicles' one-liner does."""
        return self.shape.hidden_size // self.shape.num_layers

    @property
    def embedding_bytes_per_gpu(self) -> float:
        """Bytes of weights, gradients and optimizer of the word embedding on one GPU."""
        return STATE_BYTES_PER_PARAMETER * self.shape.embedding_parameters / self.tp

    @property
    def block_bytes_per_gpu(self) -> float:
        """The same of one transformer layer."""
        return STATE_BYTES_PER_PARAMETER * self.shape.layer_parameters / self.tp

    @property
    def layers_per_stage(self) -> float:
        """Transformer layers of one pipeline stage, embedding not counted."""
        return self.shape.num_layers / self.pp

    def to_json(self) -> dict[str, Any]:
        """The model with its size by the chronicles' formula."""
        s = self.shape
        values = {"origin": self.origin, "layers": s.num_layers, "hidden": s.hidden_size, "ratio": self.ratio}
        return {**values, "params": s.parameters, "printed_b": self.printed_b, "line": size_line(s)}


def size_line(shape: ModelShape) -> str:
    """The chronicles' line: "Model size: 199B, ratio=179"."""
    return f"Model size: {shape.parameters / 1e9:.0f}B, ratio={shape.hidden_size // shape.num_layers}"


def state_lines(shape: ModelShape, tp: int) -> tuple[str, str]:
    """The chronicles' two lines of parameters / bytes of states, whole and per GPU.

    They print bytes in millions and write GB behind them ("38773.52GB"); here the figure is divided by the 1000 missed.
    """
    lines = []
    for name, parameters in (("emb", shape.embedding_parameters), ("blk", shape.layer_parameters)):
        m, gb = parameters / 1e6, parameters * STATE_BYTES_PER_PARAMETER / 1e9
        lines.append(f"{name} size: {m:.2f}M/{gb:.2f}GB, per gpu {m / tp:.2f}M/{gb / tp:.2f}GB")
    return lines[0], lines[1]


def planned_models() -> list[PlannedModel]:
    """The models of the prequel's sections 'Existing models' and 'Possible 200B models', with their replicas."""
    return _read("planned")


def published_models() -> list[PlannedModel]:
    """Every shape of the prequel whose size is printed: its table 'Size', its ideas, and what it measured."""
    return _read("published")


def _read(name: str) -> list[PlannedModel]:
    models = read_json(DATA / "published.json", "published")[name]
    return [from_mapping(PlannedModel, model, "model") for model in models]


def sizes() -> Columns:
    """Every published shape with its size as printed and by formula."""
    known = published_models()
    columns: dict[str, Any] = {
        "origin": [m.origin for m in known],
        "layers": [m.shape.num_layers for m in known],
        "hidden": [m.shape.hidden_size for m in known],
        "hidden / layers": [m.ratio for m in known],
        "rows of embedding": [f"{m.shape.vocab_size:,}" for m in known],
        "printed (B)": [m.printed_b for m in known],
        "by formula (B)": [m.shape.parameters / 1e9 for m in known],
    }
    return Columns(columns, digits=2)


def states() -> Columns:
    """What embedding and layers of the planned models take on one GPU, 18 bytes a parameter."""
    models = planned_models()
    stage = [m.layers_per_stage * m.block_bytes_per_gpu for m in models]
    first = [s + m.embedding_bytes_per_gpu for s, m in zip(stage, models, strict=True)]
    columns: dict[str, Any] = {
        "model": [m.origin for m in models],
        "B": [round(m.shape.parameters / 1e9) for m in models],
        "layers": [m.shape.num_layers for m in models],
        "hidden": [m.shape.hidden_size for m in models],
        "TP": [m.tp for m in models],
        "PP": [m.pp for m in models],
        "GPUs": [m.tp * m.pp for m in models],
        "embedding (GB)": [round(m.embedding_bytes_per_gpu / 1e9, 2) for m in models],
        "layer (GB)": [round(m.block_bytes_per_gpu / 1e9, 2) for m in models],
        "layers a stage": [round(m.layers_per_stage, 1) for m in models],
        "middle stage (GB)": [round(s / 1e9, 1) for s in stage],
        "first stage (GB)": [round(s / 1e9, 1) for s in first],
    }
    return Columns(columns)


def lines() -> Html:
    """The document's own lines on embedding and layer of each planned model, in the right unit."""
    lines = [(m.origin, line) for m in planned_models()[1:] for line in state_lines(m.shape, m.tp)]
    return Html.pre("\n".join(f"{origin:12} {line}" for origin, line in lines))
