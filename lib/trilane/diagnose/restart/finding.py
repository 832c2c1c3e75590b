"""A finding of a restart: what is wrong, in which tensor, on which ranks, and how large the difference is."""

from dataclasses import dataclass
from typing import Any

from trilane.diagnose.hang.verdict import span
from trilane.diagnose.restart.snapshot import RankPrint
from trilane.workspace.rank_grid import shared

KINDS = {
    "reset": "reset to its defaults",
    "not-restored": "not what was saved",
    "missing": "missing",
    "tied": "the tied embedding differs at the ends of the pipeline",
    "tensor-replicas": "replicas differ across tensor-parallel ranks",
    "data-replicas": "replicas differ across data-parallel ranks",
    "decay": "in the wrong weight-decay group",
    "clipping": "gradients were not clipped",
    "copy": "the model computes with another weight than the optimizer holds",
    "generators": "random number generators not restored",
    "data": "data order not restored",
    "optimizer": "optimizer not restored",
}


@dataclass(frozen=True, kw_only=True)
class RestartFinding:
    """A finding of one of KINDS. `tensor` is "" where it concerns none; `size` is the relative difference, if any."""

    kind: str
    what: str
    tensor: str = ""
    ranks: tuple[RankPrint, ...] = ()
    size: float | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS, self.kind

    @property
    def where(self) -> str:
        """The ranks, and the coordinates that they share."""
        if not self.ranks:
            return "all ranks"
        if len(self.ranks) == 1:
            return self.ranks[0].place
        common = ", ".join(shared(self.ranks))
        return f"ranks {span([r.rank for r in self.ranks])}" + (f" ({common})" if common else "")

    def line(self) -> str:
        """The finding in one line."""
        return f"{self.kind}: {self.tensor + ', ' if self.tensor else ''}{self.where}: {self.what}"

    def to_json(self) -> dict[str, Any]:
        ranks = [{axis: getattr(r, axis) for axis in ("rank", "tp", "pp", "dp")} for r in self.ranks]
        return {"kind": self.kind, "tensor": self.tensor, "ranks": ranks, "what": self.what, "size": self.size}


def share(size: float) -> str:
    """A relative difference as a percentage."""
    return f"{100 * size:.2g} %" if size < 0.995 else f"{100 * size:.0f} %"
