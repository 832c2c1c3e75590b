"""Candidates of a search as plans, and shapes read from text or files."""

from pathlib import Path
from typing import Any

from trilane.config import cluster as hardware
from trilane.config.engines import ENGINES, unsupported_reason
from trilane.config.model import ModelShape, parse_shape
from trilane.config.plan import Plan
from trilane.planning.search import Candidate
from trilane.utils.validation import from_mapping, read_json


def plan_of(candidate: Candidate, shape: ModelShape, cluster: hardware.Cluster) -> dict[str, Any]:
    """A candidate as the JSON of a plan for the first engine that takes it, with its prediction beside it."""
    label = f"{candidate.topology.label}-gbs{candidate.topology.gbs}"
    takes = (engine for engine in ENGINES if unsupported_reason(engine, shape, candidate.topology) is None)
    engine = next(takes, ENGINES[0])
    plan = Plan(label=label, shape=shape, cluster=cluster, topology=candidate.topology, engine=engine)
    return {**plan.to_json(), "prediction": candidate.prediction.to_json()}


def read_shape(text: str) -> ModelShape:
    """The shape of five numbers, of a JSON file with them, or of a plan's file."""
    if not text.endswith(".json") and not Path(text).is_file():
        return parse_shape(text)
    values = read_json(text, "shape")
    return from_mapping(ModelShape, values.get("shape", values) if isinstance(values, dict) else values, "shape")
