"""Profiles of a run: profile/<rank>.json, the seconds of each operator by part, and the table of it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trilane.utils.files import json_object, read_text, replace_text
from trilane.utils.validation import require

FOLDER = "profile"
MARK = "part: "  # how the trace names the ranges of parts
HEAD = "head and loss"
ORDER = ("attention", "MLP", "norms", "embedding", HEAD, "optimizer", "communication", "other")
# Kinds of work, which are parts of the prediction (costmodel.iteration.IterationTime).
KINDS = ("matmul", "attention", "elementwise", "communication", "optimizer")
MATMUL = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm", "aten::matmul", "aten::linear")
CORE = ("scaled_dot_product", "flash_attention", "efficient_attention", "cudnn_attention", "fmha")


@dataclass(frozen=True, kw_only=True)
class Operator:
    """One operator in one part: its own seconds and calls, of an iteration where it is in a Profile."""

    part: str
    name: str
    kind: str
    seconds: float
    calls: float

    def per_iteration(self, iterations: int) -> "Operator":
        """The mean over so many iterations."""
        return replace(self, seconds=self.seconds / iterations, calls=self.calls / iterations)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What one rank did in iterations `first` to `last`: `seconds` an iteration, and its operators, longest first."""

    rank: int
    device: str
    first: int
    last: int
    seconds: float
    operators: tuple[Operator, ...]

    def by_part(self) -> dict[str, float]:
        """Seconds of each part."""
        return self._sums("part", ORDER)

    def by_kind(self) -> dict[str, float]:
        """Seconds of each kind of work, as the planner predicts them."""
        return self._sums("kind", KINDS)

    @property
    def rest(self) -> float:
        """Seconds outside of all operators: a GPU without work, or the interpreter's time on a CPU."""
        return max(0.0, self.seconds - sum(operator.seconds for operator in self.operators))

    def _sums(self, name: str, order: tuple[str, ...]) -> dict[str, float]:
        sums = dict.fromkeys(order, 0.0)
        for operator in self.operators:
            sums[getattr(operator, name)] += operator.seconds
        return sums


def kind_of(part: str, name: str) -> str:
    """The planner's kind of an operator: matmul, attention, elementwise, communication or optimizer."""
    if part in ("communication", "optimizer"):
        return part
    if any(core in name for core in CORE):
        return "attention"
    return "matmul" if name in MATMUL else "elementwise"


def write_profile(folder: Path, profile: Profile) -> None:
    """Write profile/<rank>.json and the table profile/<rank>.txt."""
    (folder / FOLDER).mkdir(exist_ok=True)
    replace_text(folder / FOLDER / f"{profile.rank}.json", json.dumps(asdict(profile)) + "\n")
    replace_text(folder / FOLDER / f"{profile.rank}.txt", table(profile) + "\n")


def read_profiles(folder: Path) -> list[Profile]:
    """The profiles of a run folder by rank; ValueError where it holds none."""
    found = []
    for path in sorted((folder / FOLDER).glob("*.json")):
        values = json_object(read_text(path)) or {}
        try:
            operators = tuple(Operator(**operator) for operator in values.pop("operators"))
            found.append(Profile(**values, operators=operators))
        except (KeyError, TypeError):
            continue
    require(bool(found), "folder", folder, "holds no profile; set run.profile in the plan, such as 10-12")
    return sorted(found, key=lambda profile: profile.rank)


def table(profile: Profile, predicted: Mapping[str, float] | None = None, operators: int = 12) -> str:
    """The profile as text: seconds by part, by kind (beside the prediction where there is one), longest operators."""
    span = f"{profile.first} to {profile.last}" if profile.last > profile.first else f"{profile.first}"
    where = "kernels' seconds" if profile.device == "cuda" else "operators' seconds"
    head = f"rank {profile.rank}, iterations {span}: {profile.seconds:.4f} s each; {where} by part"
    rest = "no kernel runs" if profile.device == "cuda" else "outside of operators"
    lines = [head, *_rows(profile, {**profile.by_part(), rest: profile.rest}, {})]
    lines += [
        "by kind, and as predicted" if predicted else "by kind",
        *_rows(profile, profile.by_kind(), predicted or {}),
    ]
    longest = profile.operators[:operators]
    lines += ["longest operators"]
    lines += [f"  {o.seconds:10.6f} s {o.calls:8.0f} calls  {o.part}: {o.name[:90]}" for o in longest]
    return "\n".join(lines)


def _rows(profile: Profile, seconds: Mapping[str, float], predicted: Mapping[str, float]) -> Iterable[str]:
    for name, value in seconds.items():
        if value or predicted.get(name):
            beside = f"  predicted {predicted[name]:.6f} s" if name in predicted else ""
            yield f"  {name:22s} {value:10.6f} s {value / profile.seconds:7.1%}{beside}"
