"""The planning table of the chronicles: published models, their ideas for 200B, and what these take on one GPU."""

from dataclasses import dataclass
from typing import Any

from trilane.config.model import ModelShape
from trilane.utils.tables import Columns, Text

STATE_BYTES_PER_PARAMETER = 18  # fp16 weights 2, gradients 4, fp32 masters 4, Adam's moments 8: BigScience chronicles
OLD_VOCABULARY = 50_257  # GPT-2's; the chronicles take it for every published model
PLANNING_VOCABULARY = 150_257  # the chronicles' first estimate of the multilingual vocabulary
VOCABULARY = 250_880  # the padded one of the tables from 02-17 on


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
    def replica_gpus(self) -> int:
        """GPUs of one replica."""
        return self.tp * self.pp

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

    @property
    def parameters_per_gpu(self) -> tuple[float, float]:
        """Parameters on a GPU of a stage with and without the embedding: tp divides all (norms and biases too)."""
        layers = self.layers_per_stage * self.shape.layer_parameters / self.tp
        return layers + self.shape.embedding_parameters / self.tp, layers


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
    rows = [
        ("bs 104B", 64, 11600, 80, OLD_VOCABULARY, 4, 32, 104),
        ("meg-lm 145B", 80, 12288, 96, OLD_VOCABULARY, 8, 8, 146),
        ("meg-lm 310B", 96, 16384, 128, OLD_VOCABULARY, 8, 16, 310),
        ("msft 530B", 105, 20480, 128, OLD_VOCABULARY, 8, 35, 530),
        ("199B, wide", 80, 14336, 64, PLANNING_VOCABULARY, 8, 10, 199),
        ("206B, deep", 96, 13312, 64, PLANNING_VOCABULARY, 8, 12, 206),
    ]
    return [
        PlannedModel(origin=origin, shape=_shape(L, h, a, V), tp=tp, pp=pp, printed_b=printed)
        for origin, L, h, a, V, tp, pp, printed in rows
    ]


def published_models() -> list[PlannedModel]:
    """Every shape of the prequel whose size is printed: its table 'Size', its ideas, and the shapes that it measured.

    530B stands as it should: the document repeats the 310B line ("Model size: 310B, ratio=170") under it.
    """
    rows = [
        ("bs", 64, 11600, 80, OLD_VOCABULARY, 104),
        ("meg-lm", 80, 12288, 96, OLD_VOCABULARY, 146),
        ("openai", 96, 12288, 96, OLD_VOCABULARY, 175),
        ("meg-lm", 96, 16384, 128, OLD_VOCABULARY, 310),
        ("msft", 105, 20480, 128, OLD_VOCABULARY, 530),
        ("idea, narrow", 112, 12288, 96, PLANNING_VOCABULARY, 205),
        ("idea, deep", 96, 13312, 64, PLANNING_VOCABULARY, 206),
        ("idea, wide", 80, 14336, 64, PLANNING_VOCABULARY, 199),
        ("02-21", 72, 14336, 64, VOCABULARY, 181),
        ("02-21", 84, 13824, 64, VOCABULARY, 196),
        ("02-21", 80, 13824, 64, VOCABULARY, 187),
        ("02-23", 96, 12288, 64, VOCABULARY, 177),
        ("02-23", 84, 13312, 64, VOCABULARY, 182),
        ("02-23", 78, 13824, 64, VOCABULARY, 182),
        ("02-28", 106, 12288, 64, VOCABULARY, 195),
        ("02-28", 100, 12288, 64, VOCABULARY, 184),
        ("02-28", 82, 13312, 64, VOCABULARY, 178),
        ("02-28", 94, 13312, 128, VOCABULARY, 203),
        ("02-28", 70, 14336, 112, VOCABULARY, 176),
        ("02-28", 82, 14336, 128, VOCABULARY, 206),
    ]
    return [PlannedModel(origin=o, shape=_shape(L, h, a, V), printed_b=b) for o, L, h, a, V, b in rows]


def _shape(layers: int, hidden: int, heads: int, vocab: int) -> ModelShape:
    return ModelShape(
        num_layers=layers, hidden_size=hidden, num_attention_heads=heads, seq_length=2048, vocab_size=vocab
    )


def published_sizes() -> Columns:
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


def published_states() -> Columns:
    """What embedding and layers of the planned models take on one GPU, 18 bytes a parameter."""
    models = planned_models()
    stage = [m.layers_per_stage * m.block_bytes_per_gpu for m in models]
    columns: dict[str, Any] = {
        "model": [m.origin for m in models],
        "B": [round(m.shape.parameters / 1e9) for m in models],
        "layers": [m.shape.num_layers for m in models],
        "hidden": [m.shape.hidden_size for m in models],
        "TP": [m.tp for m in models],
        "PP": [m.pp for m in models],
        "GPUs": [m.replica_gpus for m in models],
        "embedding (GB)": [round(m.embedding_bytes_per_gpu / 1e9, 2) for m in models],
        "layer (GB)": [round(m.block_bytes_per_gpu / 1e9, 2) for m in models],
        "layers a stage": [round(m.layers_per_stage, 1) for m in models],
        "middle stage (GB)": [round(held / 1e9, 1) for held in stage],
        "first stage (GB)": [
            round((held + m.embedding_bytes_per_gpu) / 1e9, 1) for held, m in zip(stage, models, strict=True)
        ],
    }
    return Columns(columns)


def published_lines() -> Text:
    """The document's own lines on embedding and layer of each planned model, in the right unit."""
    lines = [(m.origin, line) for m in planned_models()[1:] for line in state_lines(m.shape, m.tp)]
    return Text("\n".join(["```", *(f"{origin:12} {line}" for origin, line in lines), "```"]))
