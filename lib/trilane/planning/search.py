"""Search: every topology of a space predicted, the refused counted by rule, the rest ranked."""

import contextlib
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from trilane.config.cluster import Cluster
from trilane.config.engines import ENGINES, label_of, unsupported_rule
from trilane.config.model import ModelShape
from trilane.config.parallelism import CLUSTER_RULES, SHAPE_RULES, TOPOLOGY_RULES, Rule
from trilane.config.plan import Plan
from trilane.config.shapes import read_shape
from trilane.costmodel.calibration import Calibration
from trilane.costmodel.columns import columns_of
from trilane.costmodel.iteration import iteration_columns
from trilane.costmodel.memory import memory_bytes, memory_for, oom_probability
from trilane.costmodel.predict import IMPOSSIBLE, RISKY, predict
from trilane.costmodel.shipped import calibration_for
from trilane.planning.search_result import Candidate, SearchResult, first_per_sizes
from trilane.planning.space import (
    SIZES,
    Block,
    ParallelSizes,
    Point,
    Space,
    block_columns,
    space_for,
    topology_of,
    word,
)
from trilane.utils.progress import progress
from trilane.utils.validation import require_integer
from trilane.workspace.study import load_cluster

MEMORY_RULE = "memory must fit the card"


class Row(NamedTuple):
    """One topology that can run, with its seconds per sequence and its memory."""

    seconds: float
    memory: float
    topology: tuple[ParallelSizes, Point, float, float]  # with mbs and gbs


def front_of(seconds: np.ndarray, memory: np.ndarray) -> np.ndarray:
    """Rows that no other row beats in both seconds and memory, the fastest first."""
    order = np.lexsort((memory, seconds))
    lowest = np.minimum.accumulate(memory[order])
    return order[np.append([True] * (len(order) > 0), memory[order][1:] < lowest[:-1]).astype(bool)]


class _Search:
    """One pass over a space: the best `top` of the safe and of the risky, and the Pareto front,
    kept on the way.
    """

    def __init__(
        self,
        shape: ModelShape,
        cluster: Cluster,
        space: Space,
        calibration: Calibration,
        **how: Any,
    ):
        self.shape, self.cluster, self.space, self.calibration = (
            shape,
            cluster,
            space,
            calibration.on_card(cluster),
        )
        self.kept = calibration.kept()
        self.top = how["top"]
        # variants of one tp x pp x dp are no different answers, unless there is no other
        self.distinct = how["distinct"] and len({*space.sizes()}) > 1
        self.safe, self.risky, self.front = list[Row](), list[Row](), list[Row]()
        rules: list[tuple[Rule, tuple[Any, ...]]] = [(rule, (cluster,)) for rule in CLUSTER_RULES]
        rules += [(rule, (shape,)) for rule in SHAPE_RULES]
        # Space.batches() has multiples of mbs x dp alone
        rules += [(rule, ()) for rule in TOPOLOGY_RULES if rule.field != "gbs"]
        # one look at tp, pp and dp refuses all batch sizes and choices
        self.size_rules = [pair for pair in rules if pair[0].of_sizes]
        self.rules = [pair for pair in rules if not pair[0].of_sizes]
        self.columns = columns_of(shape, space.fixed, space.engine)
        self.memory = memory_for(calibration, space.engine, cluster)
        self.points, self.batches = functools.cache(space.points), functools.cache(space.batches)
        self.refused: Counter[str] = Counter()
        self.runnable = 0

    def allowed(self, block: Any) -> Any:
        """Which batch sizes of a block no rule refuses: True, False or an array; the refused are
        counted under the first rule that they break.
        """
        keep, left = True, len(block.mbs)
        for rule, subjects in self.rules:
            holds = rule.holds(block, *subjects)
            if holds is True:  # most often: a rule that no batch size breaks
                continue
            keep, before = keep & holds, left
            left = int(np.count_nonzero(keep))
            self.refused[rule.name] += before - left
            if not left:
                return False
        if broken := unsupported_rule(self.space.engine, self.shape, block):
            self.refused[f"{broken[0]}: {broken[2]}"] += left
            return False
        return keep

    def blocks(self, sizes: ParallelSizes) -> Iterator[Block]:
        """What no rule refuses of one tp x pp x dp, a block for each combination of the other
        choices.
        """
        (tp, pp, dp), (mbs, gbs), fixed = sizes, self.batches(sizes[2]), self.space.fixed
        values = {
            **vars(fixed),
            "tp": tp,
            "pp": pp,
            "dp": dp,
            "mbs": mbs,
            "gbs": gbs,
            "gpus": tp * pp * dp * fixed.cp,
        }
        whole: Any = SimpleNamespace(**values)
        points = self.points(max(self.shape.num_layers // pp, 1), tp > 1, pp > 1, dp > 1)
        broken = next(
            (rule.name for rule, subjects in self.size_rules if not rule.holds(whole, *subjects)),
            "",
        )
        field, _, rule = unsupported_rule(self.space.engine, self.shape, whole) or ("", None, "")
        if broken or field in SIZES:
            self.refused[broken or f"{field}: {rule}"] += len(points) * len(mbs)
            return
        whole.microbatches = (gbs / (mbs * dp)).astype(
            np.int32
        )  # a remainder of floats takes four times as long
        for point in points:
            vars(whole).update(point)
            if (keep := self.allowed(whole)) is not False:
                yield Block(sizes, point, *((mbs, gbs) if keep is True else (mbs[keep], gbs[keep])))

    def predict(self, blocks: Sequence[Block]) -> None:
        """Predict the topologies of some blocks together, and keep the best of them."""
        which = np.repeat(np.arange(len(blocks)), [len(block.mbs) for block in blocks])
        columns = block_columns(self.columns, blocks, which)
        memory = memory_bytes(columns, self.cluster, self.memory)
        probability = oom_probability(memory, self.cluster, self.memory.spread)
        fits = probability <= IMPOSSIBLE
        self.refused[MEMORY_RULE] += int(len(fits) - fits.sum())
        self.runnable += int(fits.sum())
        if not fits.any():
            return
        columns, memory, which = columns.take(fits), memory[fits], which[fits]
        seconds = iteration_columns(columns, self.cluster, self.calibration).total / columns.gbs

        def rows(index: np.ndarray) -> list[Row]:
            values = (seconds, memory, which, columns.mbs, columns.gbs)
            found = zip(*(column[index] for column in values), strict=True)
            return [Row(s, b, (blocks[w].sizes, blocks[w].point, m, g)) for s, b, w, m, g in found]

        numbers = {sizes: n for n, sizes in enumerate({block.sizes for block in blocks})}
        lanes = np.array([numbers[block.sizes] for block in blocks])
        danger = probability[fits] > RISKY
        for best, able in ((self.safe, ~danger), (self.risky, danger)):
            # a row is a Python object: only what may enter the best becomes one
            worst = best[-1].seconds if len(best) == self.top else np.inf
            index = np.flatnonzero(able & (seconds <= worst))
            index = index[np.argsort(seconds[index], kind="stable")]
            if self.distinct:
                index = index[np.sort(np.unique(lanes[which[index]], return_index=True)[1])]
            merged = sorted([*best, *rows(index[: self.top])], key=lambda row: row.seconds)
            best[:] = (
                first_per_sizes(merged, lambda row: row.topology[0]) if self.distinct else merged
            )[: self.top]
        # what a row of another block beats leaves at the end, in pareto()
        calm = np.flatnonzero(~danger)
        self.front += rows(calm[front_of(seconds[calm], memory[calm])])

    def run(self) -> SearchResult:
        """All topologies, some thousands at a time; what no rule refuses is predicted."""
        able = [sizes for sizes in self.space.sizes() if len(self.batches(sizes[2])[0])]
        found, rows = list[Block](), 0
        for block in (
            block for sizes in progress(able, "search", "size") for block in self.blocks(sizes)
        ):
            found.append(block)
            rows += len(block.mbs)
            if rows > 1 << 14:  # 128 KiB a column, which stays in the cache
                self.predict(found)
                found, rows = [], 0
        if found:
            self.predict(found)
        return SearchResult(
            space=self.space,
            candidates=tuple(self.candidates(self.safe)),
            risky=tuple(self.candidates(self.risky)),
            runnable=self.runnable,
            refused_by_rule={rule: count for rule, count in self.refused.most_common() if count},
            front=self.pareto,
            cures=self.cures,
        )

    def cures(self) -> list[str]:
        """Up to three changes, as options, that let some topology run without risk; GPUs where
        nothing else does.
        """
        s, found = (
            dataclasses.replace(self.space, gpus=self.space.gpus[:1], gbs=self.space.gbs[-1:]),
            list[str](),
        )
        n, pins = s.gpus[0], dict(s.pins)
        tries: list[tuple[list[str], dict[str, Any]]]
        tries = [
            ([name], {"pins": {k: pin for k, pin in pins.items() if k != name}}) for name in pins
        ]
        tries += [([*pins], {"pins": {}}), (["gbs"], {"gbs": (max(1, round(s.gbs[0] / n)) * n,)})]
        tries += [(["engine"], {"engine": engine}) for engine in ENGINES if engine != s.engine]
        counts = [
            1 << n.bit_length() - 1,
            *(n << k for k in range(1, 20) if n << k <= self.cluster.max_gpus),
        ]
        free = {name: pin for name, pin in pins.items() if name not in SIZES}
        tries += [
            (["gpus", *(pins.keys() - free)], {"gpus": (count,), "pins": free}) for count in counts
        ]
        for names, change in tries:
            if len(found) == 3 or (found and "gpus" in names):
                break
            with contextlib.suppress(ValueError):
                space = dataclasses.replace(s, **change)
                for c in search_space(
                    self.shape, self.cluster, space, self.calibration, top=1
                ).candidates:
                    values = {**vars(c.topology), "engine": c.plan.engine, "gpus": c.topology.gpus}
                    new = [name for name in names if values[name] not in pins.get(name, ())]
                    found.append(
                        " ".join(f"--{name.replace('_', '-')} {word(values[name])}" for name in new)
                    )
        return [*dict.fromkeys(found)]

    def pareto(self) -> list[Candidate]:
        seconds, memory = (
            np.array([getattr(row, name) for row in self.front]) for name in ("seconds", "memory")
        )
        return self.candidates(self.front[i] for i in front_of(seconds, memory))

    def candidates(self, rows: Iterable[Row]) -> list[Candidate]:
        """Each row as a plan, predicted in full."""
        several, result = len(self.space.gbs) > 1, []
        for row in rows:
            t = topology_of(self.space, *row.topology)
            label = (
                label_of(self.shape, self.cluster, t, self.space.engine) + f"-gbs{t.gbs}" * several
            )
            made: dict[str, Any] = {
                "shape": self.shape,
                "cluster": self.cluster,
                "engine": self.space.engine,
            }
            made["calibration"] = self.kept
            plan = Plan(label=label, topology=t, **made)
            result.append(Candidate(plan=plan, prediction=predict(plan, self.calibration)))
        return result


def search_space(
    shape: ModelShape,
    cluster: Cluster,
    space: Space,
    calibration: Calibration | None = None,
    top: int = 200,
    distinct: bool = False,
) -> SearchResult:
    """Predict every topology of a space; the `top` fastest, and the front of speed against memory."""
    require_integer("top", top, 1)
    cluster.gpu.flops_per_s(space.fixed.precision)
    known = calibration or calibration_for(cluster)
    return _Search(shape, cluster, space, known, top=top, distinct=distinct).run()


def search(
    shape: ModelShape | str,
    cluster: Cluster | str,
    *,
    gpus: int | Sequence[int],
    gbs: int | Sequence[int],
    engine: str = ENGINES[0],
    calibration: Calibration | str | None = None,
    top: int = 500,
    distinct: bool = False,
    **choices: Any,
) -> SearchResult:
    """Every topology of `gpus` GPUs (one or more counts) and `gbs` sequences an iteration that the
    engine can train.

    `choices` pins what the search would vary, by Topology's names, each to one value or several, or
    sets what it holds fixed (precision, attention, fp32_gradients, ...).
    SearchResult.space.held_fixed names what was not varied. With `distinct`, the `top` best are of
    as many tp x pp x dp; where there is only one, they are its variants.

        search(shape, load_cluster("jz-a100-80g"), gpus=384, gbs=2048, mbs=(1, 2), recompute="full")
    """
    shape = read_shape(shape).shape
    cluster = load_cluster(cluster)
    known = calibration_for(cluster, calibration or "")
    space = space_for(shape, cluster, gpus=gpus, gbs=gbs, engine=engine, **choices)
    return search_space(shape, cluster, space, known, top, distinct)
