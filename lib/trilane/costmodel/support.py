"""Support: the measured run that a prediction rests on, and how far it is from it."""

import csv
import functools
import math
from typing import Any

import numpy as np

from trilane.costmodel.calibration import Calibration, Configuration
from trilane.costmodel.columns import columns_of
from trilane.utils.frozen import frozen
from trilane.utils.validation import DATA, shipped_json

DISTANCES = shipped_json("distances")
SPANS = DISTANCES["spans"]
KINDS = DISTANCES["kinds"]
DIFFERS = 0.4  # the smallest distance that is named
NEAR = 0.5  # up to this distance the fitted interval holds
FAR = 1.0  # from here on no measured run supports a prediction


@frozen
class Support:
    """Which measured run a prediction rests on: the nearest `row`, its distance, and what sets it
    apart.

    A distance is the root of the squares of what differs (data/distances.json). `stack` is its
    software. `mfu` is the share of the card's peak that the prediction reaches, and `record` the
    largest that any measured run of such cards has.
    """

    DERIVED = ("words",)
    row: str
    distance: float
    differs: tuple[str, ...]
    stack: str
    mfu: float
    record: float

    @property
    def words(self) -> str:
        """One sentence for commands, notebooks and reports."""
        run = f"{self.row} ({self.stack})" if self.stack else self.row
        text = f"rests on measured runs such as {run}, at a distance of {self.distance:.1f}"
        if self.distance > FAR:
            text = f"no measured run like this; the nearest is {run}, at a distance of "
            text += f"{self.distance:.1f}: another {', '.join(self.differs)}"
        if self.mfu > self.record:
            text += f"; {self.mfu:.0%} of the card's peak, where no measured run has more than "
            text += f"{self.record:.0%}"
        return text

    @property
    def widening(self) -> float:
        """What the distance adds to the half-width of the interval of ln(seconds), as the root of
        the squares: a tenth for each unit beyond NEAR, and as much as the prediction is faster than
        any measured run (our choices).
        """
        beyond = min(max(self.distance - NEAR, 0.0), 5.0)
        return 0.10 * beyond + math.log(max(self.mfu / self.record, 1.0))


def support(case: Configuration, calibration: Calibration, seconds: float) -> Support:
    """The shipped row nearest to a case, of which those of other software than the constants' are
    further; or the nearest of one's own runs, by its sizes alone, where the constants are of these.
    """
    rows, sizes, kinds, records = measured()
    own = features(case, calibration.stack, seconds)
    place = _apart(sizes_of(case))
    if calibration.own:
        parts = np.abs(_apart(calibration.own) - place)
    else:
        differs = (kinds != [own[name] for name in KINDS]) * [*KINDS.values()]
        differs[:, -1] *= calibration.stack != ""
        parts = np.hstack([np.abs(sizes - place), differs])
    distances = np.sqrt((parts**2).sum(1))
    first = int(np.argmin(distances))
    largest = sorted(zip(parts[first].tolist(), [*SPANS, *KINDS], strict=False), reverse=True)
    words = DISTANCES["names"]
    nearest = {"row_id": "one of your own", "software": ""}
    if not calibration.own:
        nearest = rows[first]
    return Support(
        row=nearest["row_id"],
        distance=float(distances[first]),
        differs=tuple(words.get(name, name) for part, name in largest if part >= DIFFERS),
        stack=nearest["software"],
        mfu=own["mfu"],
        record=records.get(own["peak"], math.inf),
    )


def sizes_of(case: Configuration) -> tuple[float, ...]:
    """The sizes of a case in the order of SPANS."""
    columns = columns_of(case.shape, case.topology, case.engine)
    return tuple(float(getattr(columns, name)) for name in SPANS)


def _apart(sizes: Any) -> np.ndarray:
    return np.log(sizes) / np.log([*SPANS.values()])


def features(case: Configuration, stack: str, seconds: float) -> dict[str, Any]:
    """What of a case is no size, by the names of KINDS; and the share of the peak that it reaches
    in so many seconds, by FLOPs without recomputation.
    """
    shape = case.shape
    t = case.topology
    gpu = case.cluster.gpu
    kernel = "fused"
    if t.attention == "scores":
        kernel = "unaligned" if shape.head_dim % 8 else "aligned"
    precision = t.precision.replace("bf16", "fp16")
    peak = seconds * t.gpus * gpu.flops_per_s(t.precision)
    facts = {
        "card": gpu.name.partition("-")[0],
        "cluster": case.cluster.name.replace("16g", "32g"),
        "attention kernel": kernel,
        "precision": t.precision in ("fp8", "fp4"),
        "offload": t.offload,
        "ZeRO": t.zero > 1,
        "context parallelism": t.cp > 1,
        "groups over nodes": t.tp > case.cluster.domain,
        "software": stack,
        "peak": f"{gpu.compute_capability} {precision}",
    }
    values = {name: str(value) for name, value in facts.items()}
    return values | {"mfu": shape.flops_per_iteration(t.gbs) / peak}


@functools.cache
def measured() -> tuple[list[dict[str, str]], np.ndarray, np.ndarray, dict[str, float]]:
    """The shipped rows as data/support.csv has them (benchmarks/fit_calibrations.py writes it),
    their sizes as _apart() has them (R, SPANS), their kinds (R, KINDS), and the largest share of
    each peak.
    """
    with (DATA / "support.csv").open(encoding="utf-8") as file:
        rows = [*csv.DictReader(file)]
    sizes = np.array([[float(row[name]) for name in SPANS] for row in rows])
    kinds = np.array([[row[name] for name in KINDS] for row in rows])
    records = {}
    for row in sorted(rows, key=lambda row: row["mfu"]):
        records[row["peak"]] = float(row["mfu"] or "inf")
    return rows, _apart(sizes), kinds, records
