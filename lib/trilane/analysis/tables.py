"""The door `table`: the runs below a folder as the chronicles print them: GPUs, size, topology, memory, speed."""

import argparse
import csv
import html
import io
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trilane.analysis.record import KEEP, record
from trilane.config.plan import read_plan
from trilane.documents.runs import read_runs
from trilane.logs.run import RunLog, read_run_folder
from trilane.utils.validation import require

COLUMNS = ("GPUs", "Size", "DP", "TP", "PP", "MBS", "GBS", "Mem", "Sec/it", "TFLOPs", "Notes")


SUFFIXES = (".log", ".out", ".txt", ".gz")


NAN = math.nan


# an argument's names, in the order in which they are believed: Megatron, Megatron of 2020, DeepSpeed, the Trainer
WORDS = {
    "gpus": ("gpus", "world_size", "deepspeed.world_size"),
    "dp": ("dp", "data_parallel_size"),
    "tp": ("tp", "tensor_model_parallel_size", "model_parallel_size"),
    "pp": ("pp", "pipeline_model_parallel_size"),
    "mbs": ("mbs", "micro_batch_size", "deepspeed.train_micro_batch_size_per_gpu", "per_device_train_batch_size"),
    "gbs": ("gbs", "global_batch_size", "deepspeed.train_batch_size", "total_train_batch_size"),
    "layers": ("layers", "num_layers", "n_layer"),
    "hidden": ("hidden", "hidden_size", "n_embd"),
    "seq": ("seq", "seq_length", "n_positions"),
    "vocab": ("padded_vocab_size", "vocab_size"),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A run as a row; what nobody tells is NaN. `memory_bytes` is the fullest rank's, `parameters` are all of them."""

    source: str
    gpus: float
    parameters: float
    dp: float
    tp: float
    pp: float
    mbs: float
    gbs: float
    memory_bytes: float
    sec_per_it: float
    tflops: float
    status: str
    notes: str

    def cells(self) -> list[str]:
        """The row's texts, by COLUMNS."""
        memory = "OOM" if self.status == "OOM" else _text(self.memory_bytes / 2**30, "{:.1f}GiB")
        counts = [_text(value, "{:.0f}") for value in (self.dp, self.tp, self.pp, self.mbs, self.gbs)]
        speed = [_text(self.sec_per_it, "{:.4g}"), _text(self.tflops, "{:.2f}" if self.tflops >= 1 else "{:.3g}")]
        return [_text(self.gpus, "{:.0f}"), size(self.parameters), *counts, memory, *speed, self.notes]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The door's arguments."""
    parser.add_argument("folder", metavar="FOLDER", help="run folders, or logs of other trainers, at any depth")
    form = parser.add_mutually_exclusive_group()
    for name, words in (("markdown", "(the default)"), ("csv", ""), ("html", ""), ("json", "with numbers and units")):
        form.add_argument(f"--{name}", action="store_true", help=f"print {name} {words}".strip())


def run(args: argparse.Namespace) -> int:
    """Print the table; logs that cannot be read are named on stderr. ValueError where no run is found."""
    rows, bad = read_folder(args.folder)
    for line in bad:
        print(f"trilane: left out: {line}", file=sys.stderr)
    require(bool(rows), "folder", args.folder, "holds no run: neither plan.json with run.log, nor a training log")
    if args.json:
        values = [{k: None if v != v else v for k, v in asdict(row).items()} for row in rows]
        print(json.dumps({"folder": args.folder, "rows": values, "left_out": bad}, indent=1, allow_nan=False))
    else:
        write: Callable[[Sequence[Row]], str] = to_csv if args.csv else to_html if args.html else markdown
        print(write(rows), end="")
    return 0


def read_folder(folder: Path | str) -> tuple[list[Row], list[str]]:
    """The runs at and below a folder, by path, and why logs were left out; ValueError where there is no folder."""
    folder = Path(folder)
    require(folder.is_dir(), "folder", folder, "no such folder")
    ours = sorted({path.parent for path in folder.rglob("plan.json") if (path.parent / "run.log").is_file()})
    rows = [_planned(path, folder) for path in ours]
    bad = []
    for path in _logs(folder, ours):
        try:
            runs = read_runs(path, KEEP)
            rows += [_told(log, number, folder) for number, log in enumerate(runs, 1) if not len(log.bandwidth)]
            bad += [f"log={path}: a bandwidth bench"] if any(len(log.bandwidth) for log in runs) else []
        except (ValueError, OSError) as error:
            bad.append(str(error))
    return sorted(rows, key=lambda row: row.source), bad


def _logs(folder: Path, ours: Sequence[Path]) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        inside = any(own in path.parents for own in ours)
        if path.is_file() and not inside and path.suffix in SUFFIXES:
            yield path


def _planned(path: Path, folder: Path) -> Row:
    plan, log = read_plan(path / "plan.json"), read_run_folder(path)
    t, values = plan.topology, record(log)
    seconds = _number(values["sec_per_it"])
    flops = plan.shape.flops_per_iteration(t.gbs, t.recompute == "full")
    return Row(
        source=str(path.relative_to(folder)),
        gpus=t.gpus,
        parameters=plan.shape.parameters,
        dp=t.dp,
        tp=t.tp,
        pp=t.pp,
        mbs=t.mbs,
        gbs=t.gbs,
        memory_bytes=_number(values["max_memory_gib"]) * 2**30,
        sec_per_it=seconds,
        tflops=flops / seconds / t.gpus / 1e12,
        status=log.status,
        notes=_notes(path.name, log.status, plan.engine if plan.engine != "megatron" else ""),
    )


def _told(log: RunLog, number: int, folder: Path) -> Row:
    values = record(log)
    told = {name: _argument(log.arguments, names) for name, names in WORDS.items()}
    gpus, tp, pp, dp = (told[name] for name in ("gpus", "tp", "pp", "dp"))
    if gpus == gpus and tp == tp and dp != dp:
        dp = gpus // (tp * (pp if pp == pp else 1))
    rates = values["tflops"]
    name = log.source.name + (f" run {number}" if number > 1 else "")
    one = "narayanan" if rates.get("narayanan") else "printed"
    return Row(
        source=f"{log.source.relative_to(folder)} {number}",
        gpus=gpus,
        parameters=_parameters(log, told),
        dp=dp,
        tp=tp,
        pp=pp,
        mbs=told["mbs"],
        gbs=_batch(log, told["gbs"]),
        memory_bytes=_number(values["max_memory_gib"]) * 2**30,
        sec_per_it=_number(values["sec_per_it"]),
        tflops=_number(rates.get(one)),
        status=log.status,
        notes=_notes(name, log.status, "TFLOPs as printed" if rates.get(one) and one == "printed" else ""),
    )


def _argument(arguments: Mapping[str, Any], names: Sequence[str]) -> float:
    found = (arguments.get(name) for name in names)
    return next((float(v) for v in found if isinstance(v, int | float) and not isinstance(v, bool) and v > 0), NAN)


def _batch(log: RunLog, told: float) -> float:
    """The last iteration's global batch: it may have been ramped up."""
    if "global_batch_size" in log.iterations and len(log.iterations):
        return float(log.iterations["global_batch_size"].iloc[-1])
    return told


def _parameters(log: RunLog, told: Mapping[str, float]) -> float:
    """As ModelShape.parameters counts them, heads being of no matter; a typed table's size as it stands."""
    L, h, s, V = (told[name] for name in ("layers", "hidden", "seq", "vocab"))
    counted = L * (12 * h * h + 13 * h) + (V + s + 2) * h
    return counted if counted == counted else _argument(log.arguments, ("size",)) * 1e9


def size(parameters: float) -> str:
    """Parameters as people say them: 181B, 1.3B, 350M."""
    for unit, word in ((1e9, "B"), (1e6, "M"), (1e3, "K")):
        if parameters >= 0.9995 * unit:
            value = parameters / unit
            return f"{value:.0f}{word}" if value >= 9.95 else f"{value:.1f}{word}"
    return _text(parameters, "{:.0f}")


def markdown(rows: Sequence[Row]) -> str:
    """The table in Markdown, its columns aligned."""
    cells = [[text.replace("|", "\\|") for text in row.cells()] for row in rows]
    widths = [max(len(text) for text in column) for column in zip(COLUMNS, *cells, strict=True)]
    rule = [f"{'-' * (max(width, 3) - 1)}:" for width in widths[:-1]] + ["-" * max(widths[-1], 3)]
    lines = [_line(COLUMNS, widths), f"| {' | '.join(rule)} |", *(_line(texts, widths) for texts in cells)]
    return "\n".join(lines) + "\n"


def _line(texts: Sequence[str], widths: Sequence[int]) -> str:
    padded = [text.rjust(max(width, 3)) for text, width in zip(texts[:-1], widths, strict=False)]
    return f"| {' | '.join([*padded, texts[-1].ljust(max(widths[-1], 3))])} |"


def to_csv(rows: Sequence[Row]) -> str:
    """The table as CSV."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerows([COLUMNS, *(row.cells() for row in rows)])
    return out.getvalue()


def to_html(rows: Sequence[Row]) -> str:
    """The table as a piece of HTML."""

    def line(texts: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in texts) + "</tr>\n"

    body = "".join(line(row.cells(), "td") for row in rows)
    return f"<table>\n<thead>{line(COLUMNS, 'th').strip()}</thead>\n<tbody>\n{body}</tbody>\n</table>\n"


def _notes(name: str, status: str, more: str) -> str:
    return ", ".join(filter(None, (name, status if status != "completed" else "", more)))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else NAN


def _text(value: float, form: str) -> str:
    return form.format(value) if value == value else ""
