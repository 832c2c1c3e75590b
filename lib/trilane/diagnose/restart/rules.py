"""Rules for one state: weight-decay groups, gradient clipping, and equal weights in model and optimizer."""

from collections.abc import Iterator

from trilane.diagnose.restart.finding import RestartFinding, share
from trilane.diagnose.restart.replicas import scale
from trilane.diagnose.restart.snapshot import RankPrint, Snapshot
from trilane.workspace.fingerprints import COPY, Part, must_decay

# bf16 has 8 bits: a weight and its copy differ by 2e-3, relative; a tensor of denormal fp16 somewhat more.
ROUNDED = 2e-2

# Some engines sum the gradient norm in half precision, and clip to within its rounding.
SLACK = 1.02


def wrong_decay(snapshot: Snapshot) -> list[RestartFinding]:
    """Findings for norms and biases that decay, and matrices that do not."""
    wrong: dict[tuple[str, float], list[RankPrint]] = {}
    usual = snapshot.optimizer.get("weight_decay", 0.0)
    for r in snapshot.ranks:
        for part in r.parts:
            right = usual if must_decay(part.name) else 0.0
            if part.decay is not None and part.decay != right:
                wrong.setdefault((part.name, part.decay), []).append(r)
    findings = []
    for (name, decay), ranks in wrong.items():
        rule = "norms and biases must not decay" if not must_decay(name) else f"matrices decay by {usual:g}"
        what = f"its optimizer group has weight decay {decay:g}; {rule}"
        findings.append(RestartFinding(kind="decay", tensor=name, ranks=tuple(ranks), what=what, size=decay))
    return findings


def stale_copies(snapshot: Snapshot) -> list[RestartFinding]:
    """Findings for weights where the model's copy is not what the optimizer holds."""
    found: dict[str, tuple[float, list[RankPrint]]] = {}
    for r in snapshot.ranks:
        for part in r.parts:
            if {COPY, "weight"} <= {*part.marks} and (away := part.marks[COPY].apart(part.marks["weight"])) > ROUNDED:
                size, ranks = found.get(part.name, (0.0, []))
                found[part.name] = (max(size, away), [*ranks, r])
    what = "the model's copy is {} of its norm away from the optimizer's weight"
    return [
        RestartFinding(kind="copy", tensor=name, ranks=tuple(ranks), what=what.format(share(size)), size=size)
        for name, (size, ranks) in found.items()
    ]


def unclipped(snapshot: Snapshot) -> list[RestartFinding]:
    """A finding where gradients were larger than clipping allows, with the pipeline stages concerned.

    Adam's second moment after t steps is v = sum over k of (1 - b) b^(t-k) g_k^2, b = beta2 (Kingma and Ba 2015).
    Summed over all elements of the model, v / (1 - b^t) is a mean of |g_k|^2 with weights that add up to 1; and
    |g_k| <= clip_grad for every step. So it is at most clip_grad^2, whatever the gradients were. Left out: a limit that
    was lowered during the run, and a failure too rare or too small to show in the mean.
    """
    limit, step = snapshot.optimizer.get("clip_grad", 0.0), snapshot.scalars.get("step", 0)
    moments = [marks["exp_avg_sq"].total for marks in snapshot.wholes.values() if "exp_avg_sq" in marks]
    if not limit or not step or not moments:
        return []
    mean = 1 / (1 - snapshot.optimizer["adam_beta2"] ** step)
    norm = (mean * sum(moments)) ** 0.5
    if norm <= limit * SLACK:
        return []
    what = (
        f"the gradients' norm after clipping was {norm:.4g} (root mean square over the steps), clip_grad is {limit:g}"
    )
    stages = _stages(snapshot, mean, limit)
    ranks = tuple(r for r in snapshot.ranks if r.pp in stages)
    if len(stages) < len({r.pp for r in snapshot.ranks}):
        what += f"; too large on pipeline stage {', '.join(map(str, sorted(stages)))}"
    return [RestartFinding(kind="clipping", tensor="", ranks=ranks, what=what, size=norm / limit)]


def _stages(snapshot: Snapshot, mean: float, limit: float) -> set[int]:
    """The stages that were not clipped: that of the larger copy of a tied embedding, where one is a multiple of the
    other; else those above the limit by themselves; else the one that adds most."""
    ends = dict(_tied(snapshot))
    if len(ends) == 2:
        (first, one), (last, other) = sorted(ends.items())
        factor = scale(one, other)
        if factor:
            return {last if factor > 1 else first}
    shares: dict[int, float] = {}
    for pp in {r.pp for r in snapshot.ranks}:
        unique = {(part.name, part.box): part for r in snapshot.ranks if r.pp == pp for part in r.parts}
        shares[pp] = mean * sum(
            part.marks["exp_avg_sq"].total for part in unique.values() if "exp_avg_sq" in part.marks
        )
    beyond = {pp for pp, share in shares.items() if share > (limit * SLACK) ** 2}
    return beyond or {max(shares, key=lambda pp: shares[pp])}


def _tied(snapshot: Snapshot) -> Iterator[tuple[int, Part]]:
    """Pipeline stage and part of the tensor that several stages hold."""
    for held in snapshot.holders.values():
        if len({r.pp for r, _ in held}) > 1:
            yield from ((r.pp, part) for r, part in held)
            return
