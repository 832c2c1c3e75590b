"""Trackers: event files of TensorBoard read as a log, iterations written for TensorBoard and
Weights & Biases, by their own libraries. wandb 0.31 has no reader of its offline files.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from trilane.utils.tables import DataFrame
from trilane.utils.validation import require, require_file, shipped_json

# column -> tags of programs; the first is Megatron-LM's, and that which is written
TAGS = shipped_json("log_words")["tags"]


def _library(name: str) -> Any:
    """A module of a library that need not be installed."""
    package = name.partition(".")[0]
    try:
        return import_module(name)
    except ImportError:
        require(False, package, "missing", f"pip install {package}")


def event_lines(path: Path) -> Iterator[bytes]:
    """The iterations in an event file of TensorBoard, as lines of steps.jsonl. Where it has no time
    of an iteration, the time between two entries is.
    """
    require_file("log", path)
    module = _library("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(path), size_guidance={"scalars": 0}).Reload()
    rows: dict[int, dict[str, float]] = defaultdict(dict)
    for column, tags in TAGS.items():
        for tag in found.Tags()["scalars"]:
            if tag in tags:
                for event in found.Scalars(tag):
                    rows[event.step] |= {column: event.value, "at": event.wall_time}
    before = (0, math.nan)
    for step in sorted(rows):
        row = rows[step]
        now = row.pop("at")
        passed = (now - before[1]) / max(step - before[0], 1)
        before = (step, now)
        yield json.dumps({"iteration": step, "sec_per_it": passed, **row}).encode() + b"\n"


def _scalars(table: DataFrame) -> Iterator[tuple[int, dict[str, float]]]:
    """Of each iteration its number, and what is known of it by tag."""
    for row in table.to_dict("records"):
        values = {tags[0]: row.get(column, math.nan) for column, tags in TAGS.items()}
        known = {tag: value for tag, value in values.items() if math.isfinite(value)}
        yield int(row["iteration"]), known


def write_events(table: DataFrame, folder: Path) -> None:
    """Write the iterations as an event file of TensorBoard into `folder`."""
    writers = _library("tensorboard.summary.writer.event_file_writer")
    events = _library("tensorboard.compat.proto.event_pb2")
    summaries = _library("tensorboard.compat.proto.summary_pb2")
    writer = writers.EventFileWriter(str(folder))
    for step, values in _scalars(table):
        parts = [{"tag": tag, "simple_value": value} for tag, value in values.items()]
        summary = summaries.Summary(value=parts)
        writer.add_event(events.Event(step=step, wall_time=time.time(), summary=summary))
    writer.close()


def write_offline(table: DataFrame, folder: Path) -> None:
    """Write the iterations as an offline run of Weights & Biases into `folder`."""
    wandb = _library("wandb")
    folder.mkdir(parents=True)
    run = wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True))
    for step, values in _scalars(table):
        run.log(values, step=step)
    run.finish()
