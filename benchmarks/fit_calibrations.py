"""Write lib/trilane/data/calibrations.json from the shipped measured rows: python
benchmarks/fit_calibrations.py

It also prints the constants of memory (costmodel/memory.py) fitted to the rows, and their errors on
tables left out.
"""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from trilane.costmodel.calibration import to_json
from trilane.costmodel.fit import by_cluster, fit_time, robust_minimum
from trilane.costmodel.measured_rows import MeasuredRow, every_row, usable
from trilane.costmodel.memory import DEFAULT, MemoryConstants, stage_memory
from trilane.costmodel.shipped import nodes_name, prior_of
from trilane.costmodel.support import KINDS, SPANS, features, sizes_of

DATA = Path(str(resources.files("trilane").joinpath("data")))
# The stack of a cluster's rows that a plan for it rests on, if it names none.
USUAL = {"jz-a100-80g": "megatron-deepspeed", "dgx-h100": "megatron-core"}
USUAL |= {"jz-v100-32g": "megatron-deepspeed"}


def main() -> None:
    """Fit each cluster and stack, from the priors and what the stack is known to do; then write."""
    groups: dict[str, list[MeasuredRow]] = {}
    for row in every_row():
        cluster = nodes_name(row.case.cluster.name)
        groups.setdefault(f"{cluster}/{row.stack}", []).append(row)
    fitted = {}
    for name, rows in groups.items():
        timed = usable(rows)
        prior = prior_of(rows[0].case.cluster, rows[0].stack)
        fitted[name] = fit_time([r.case for r in timed], [r.seconds for r in timed], prior)
    plain = {cluster: fitted[f"{cluster}/{stack}"] for cluster, stack in USUAL.items()}
    found = {**plain, **fitted}
    lines = [f'"{name}": {json.dumps(_short(to_json(c)))}' for name, c in found.items()]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    (DATA / "calibrations.json").write_text(text, encoding="utf-8")
    with (DATA / "support.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(
            file, ["row_id", *SPANS, *KINDS, "peak", "mfu"], lineterminator="\n"
        )
        writer.writeheader()
        writer.writerows(supporting_rows())
    for name, calibration in found.items():
        print(name, calibration)
    rows = [
        r for r in every_row() if r.stack == "megatron-deepspeed" and np.isfinite(r.memory_bytes)
    ]
    distinct = [r for r in rows if not r.duplicate_of]
    print(fit_memory(distinct))
    unseen = []
    for table in {r.table for r in distinct}:
        held = fit_memory([r for r in distinct if r.table != table])
        unseen += memory_errors([r for r in distinct if r.table == table], held).tolist()
    median, p90 = np.quantile(np.abs(np.expm1(unseen)), (0.5, 0.9))
    print(
        f"memory without each row's table: median {median:.2%}, 90th percentile {p90:.2%} of {len(unseen)} rows"
    )


def supporting_rows() -> list[dict[str, Any]]:
    """What support.py reads of every row; without a share of the peak for one that does not count."""
    counted = {(row.file, row.row_id) for row in usable(every_row())}
    found = []
    for row in every_row():
        sizes = {name: f"{size:g}" for name, size in zip(SPANS, sizes_of(row.case), strict=True)}
        values = features(row.case, row.stack, row.seconds)
        is_counted = (row.file, row.row_id) in counted
        mfu = f"{values['mfu']:.4f}" if is_counted else ""
        found.append({"row_id": row.row_id, **sizes, **values, "mfu": mfu})
    return found


def _short(value: Any) -> Any:
    """Numbers by their first six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {name: _short(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_short(each) for each in value]
    return value


def memory_errors(rows: Sequence[MeasuredRow], constants: MemoryConstants) -> np.ndarray:
    """ln(predicted / measured) of the bytes of a first-stage GPU, (R,)."""
    predicted = np.empty(len(rows))
    for cluster, index, columns in by_cluster([r.case for r in rows]):
        predicted[index] = stage_memory(columns, 0, cluster, constants).total
    return np.log(predicted / [r.memory_bytes for r in rows])


def fit_memory(rows: Sequence[MeasuredRow]) -> MemoryConstants:
    """The memory constants fitted to measured bytes of a first-stage GPU, by the robust criterion
    of times.
    """
    # prior deviation of each constant's logarithm, smaller where DeepSpeed documents it
    deviations = {
        "optimizer": 0.1,
        "accumulated": 0.3,
        "checkpoint": 0.2,
        "working": 0.5,
        "logit": 0.3,
    }
    deviations |= {"base_bytes": 0.7, "slack": 0.7}

    def constants(logs: np.ndarray) -> MemoryConstants:
        return replace(DEFAULT, **dict(zip(deviations, np.exp(logs).tolist(), strict=True)))

    def errors(logs: np.ndarray) -> np.ndarray:
        return memory_errors(rows, constants(logs))

    start, each = (
        np.log([getattr(DEFAULT, n) for n in deviations]),
        partial(np.apply_along_axis, errors, -1),
    )
    # the noise is that of nvidia-smi, rounded to a gigabyte
    best = robust_minimum(
        each, start, np.array(list(deviations.values())), (start - 3, start + 3), 0.03
    )
    spread = 1.4826 * float(np.median(np.abs(errors(best)))) * (1 + len(rows) ** -0.5)
    return replace(constants(best), spread=max(spread, 0.02))


if __name__ == "__main__":
    main()
