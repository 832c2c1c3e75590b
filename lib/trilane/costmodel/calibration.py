"""Calibration: the constants of one cluster and engine, what they were fitted to, and how far
predictions scatter.
"""

import json
from dataclasses import field, replace
from functools import cached_property
from typing import Any

from trilane.config.cluster import Cluster
from trilane.config.model import ModelShape
from trilane.config.parallelism import Topology
from trilane.config.training import Dropout
from trilane.costmodel.constants import BOUNDS, GIVEN, Bound, Constants
from trilane.utils.files import hash_of
from trilane.utils.frozen import frozen
from trilane.utils.tables import Json, Record
from trilane.utils.validation import (
    from_mapping,
    require,
    require_known,
    require_line,
    to_mapping,
)

WIDEST = 200.0  # half-width of an interval of ln(seconds), far from where exp() overflows
FACTOR = Bound(0.5, 0.8, 0.002, 1.5)  # of what a regime leaves of a constant


@frozen
class Regime:
    """Days (and sizes of jobs, where given) on which some constants were others: a covariate, not
    noise.

    `factor` multiplies the constants named; a plan of today is in none of them.
    """

    name: str
    constants: tuple[str, ...]
    first_day: str
    last_day: str
    gpus: tuple[int, ...] = ()
    factor: float = FACTOR.prior

    def __post_init__(self) -> None:
        for name in self.constants:
            require_known("regime.constants", name, BOUNDS)

    def applies(self, day: str, gpus: float) -> bool:
        """Whether a run of that ISO date on that many GPUs was in this regime."""
        is_of_days = bool(day) and self.first_day <= day <= self.last_day
        return is_of_days and (not self.gpus or gpus in self.gpus)


@frozen
class Configuration(Record):
    """One run to be predicted: what ran where, in which engine, and on which ISO day ("" where
    unknown).

    `engine` "" is Megatron-DeepSpeed as the documents of the measured rows used it.
    """

    shape: ModelShape
    topology: Topology
    cluster: Cluster
    day: str = ""
    engine: str = ""
    dropout: Dropout = field(default_factory=Dropout)


@frozen
class Calibration(Record, Constants):
    """The constants of constants.py, fitted; `half_width` is the 90 % interval's, of ln(seconds);
    `rows` fitted to.

    `stack` is the software whose shipped rows they are; "" for rows of one's own, or none. `own`
    has the sizes of one's own runs, in the order of support.SPANS. `deviations` are those of the
    constants' logarithms, in the order of BOUNDS. `name` is where they were taken from: a cluster,
    a software stack, a study or a file; `card` is that of one's own rows. Raises ValueError for a
    constant outside its physical bound.
    """

    half_width: float = 0.15
    rows: int = 0
    regimes: tuple[Regime, ...] = ()
    stack: str = ""
    own: tuple[tuple[float, ...], ...] = ()
    card: str = ""
    deviations: tuple[float, ...] = tuple(bound.deviation for bound in BOUNDS.values())
    name: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        for name, bound in BOUNDS.items():
            rule = f"must lie between {bound.low} and {bound.high}"
            value = getattr(self, name)
            # a fit may end at a bound, and JSON rounds it
            is_inside = bound.low * 0.999 <= value <= bound.high * 1.001
            require(is_inside, f"calibration.{name}", value, rule)
        for name in GIVEN:
            value = getattr(self, name)
            require(0 <= value <= 1, f"calibration.{name}", value, "must lie in 0 to 1")
        is_inside = 0 < self.half_width <= WIDEST
        rule = f"must be above 0 and at most {WIDEST:g}"
        require(is_inside, "calibration.half_width", self.half_width, rule)
        for name in ("stack", "card", "name"):
            require_line(f"calibration.{name}", getattr(self, name))
        rule = f"must be {len(BOUNDS)} positive numbers"
        count = len(self.deviations)
        is_whole = count == len(BOUNDS) and all(0 < d < 10 for d in self.deviations)
        require(is_whole, "calibration.deviations", count, rule)
        is_whole = all(len(run) == 8 and min(run) > 0 for run in self.own)
        require(is_whole, "calibration.own", len(self.own), "must be 8 positive numbers a run")

    def on(self, day: str, gpus: int) -> "Calibration":
        """The calibration of one day: the factors of its regimes applied."""
        values = dict[str, Any]()
        for regime in self.regimes:
            if regime.applies(day, gpus):
                for name in regime.constants:
                    value = values.get(name, getattr(self, name))
                    values[name] = max(value * regime.factor, BOUNDS[name].low)
        return replace(self, **values) if values else self

    def without_launch_blocking(self) -> "Calibration":
        """The constants without CUDA_LAUNCH_BLOCKING=1, with which the runs behind the shipped A100
        constants blocked.

        A regime of days without it has the factor; other constants come from runs without.
        """
        for regime in self.regimes:
            if regime.name.startswith("asynchronous launches"):
                values = {name: getattr(self, name) * regime.factor for name in regime.constants}
                return replace(self, **values)
        return self

    @cached_property
    def hash(self) -> str:
        """Ten hexadecimal digits of the constants, whatever their name."""
        read_back = from_json(to_json(self))  # whole numbers become floats, as in a file
        return hash_of(json.dumps(to_json(read_back), sort_keys=True), 10)

    def kept(self) -> Json:
        """The `calibration` beside a plan's prediction in a file: name, hash and the constants
        themselves.
        """
        return {"name": self.name, "hash": self.hash, "constants": to_json(self)}


def to_json(calibration: Calibration) -> Json:
    """The constants as a JSON object, without their name; what says where they come from only where
    it is known.
    """
    values = to_mapping(calibration)
    del values["name"]
    for name in ("regimes", "stack", "own", "card"):
        if not values[name]:
            del values[name]
    return values


def from_json(values: Any, name: str = "calibration") -> Calibration:
    """The calibration of a JSON object that has every constant; ValueError names a wrong field, or
    `name` where it is of another version.

    One that is missing would silently be another number than that with which the others were
    fitted.
    """
    if isinstance(values, dict):
        values = {k: v for k, v in values.items() if k != "made_by"}  # what wrote the file
        missing = ", ".join(sorted({*BOUNDS, *GIVEN} - {*values}))
        rule = f"has other constants than this version ({missing}); calibrate or search again"
        require(not missing, "calibration", name, rule)
    return from_mapping(Calibration, values, "calibration")
