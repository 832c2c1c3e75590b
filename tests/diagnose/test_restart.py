"""What a restart lost is named, by rank and tensor, from fingerprints."""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pool import WorkerPool
from restart_plants import BUGS, CLEAN, cycle, named

from trilane.cli.app import main
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import COPY, Mark, Part, file_of, whole_parts
from trilane_diagnose.restart import compare_restart
from trilane_diagnose.snapshot import RestartFinding

# A model of four tensors on TP 2 x PP 2: name -> shape, the dimension that is cut, the stages that
# hold it.
MODEL: dict[str, tuple[tuple[int, ...], int | None, tuple[int, ...]]] = {
    "embedding.word_embeddings.weight": ((8, 6), 0, (0, 1)),
    "decoder.layers.0.input_layernorm.weight": ((6,), None, (0,)),
    "decoder.layers.1.mlp.linear_fc2.weight": ((6, 10), 1, (1,)),
    "decoder.final_layernorm.weight": ((6,), None, (1,)),
}
SHAPE = {"hidden_size": 6, "num_layers": 2}
WORD, NORM, MATRIX, FINAL = MODEL
Tensors = dict[tuple[str, str], np.ndarray]
Prints = list[dict[str, Any]]


def mark(part: np.ndarray, box: Any) -> Mark:
    import torch

    from trilane_engine.checkpoint import marks

    return marks.mark(torch.from_numpy(np.ascontiguousarray(part, np.float32)), box)


def drawn(seed: int) -> Tensors:
    random = np.random.default_rng(seed)
    made = {
        (n, k): random.normal(size=s).astype(np.float32)
        for n, (s, _, _) in MODEL.items()
        for k in KINDS
    }
    return made | {(n, "exp_avg_sq"): made[n, "exp_avg_sq"] ** 2 for n in MODEL}


def state() -> Tensors:
    """Each tensor's three kinds."""
    return drawn(7)


def prints(tensors: Tensors, **facts: Any) -> Prints:
    """The fingerprints of four ranks that hold the tensors."""
    fingerprints = []
    for rank in range(4):
        tp, pp, parts = rank % 2, rank // 2, []
        for name in (n for n, (_, _, stages) in MODEL.items() if pp in stages):
            shape, dim, _ = MODEL[name]
            box = tuple(
                (n // 2 * tp, n // 2 * (tp + 1)) if d == dim else (0, n)
                for d, n in enumerate(shape)
            )
            inside = tuple(slice(*ends) for ends in box)
            marks = {kind: mark(tensors[name, kind][inside], box) for kind in KINDS}
            decay = 0.0 if "layernorm" in name else 0.1
            parts.append(Part(name=name, shape=shape, box=box, decay=decay, marks=marks).to_json())
        optimizer = {"clip_grad": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1}
        fixed = {
            "iteration": 10,
            "consumed_samples": 80,
            "layout": ["megatron", 2, 2, 1, 1],
            "world": 4,
        }
        loose = {
            "scalars": {"step": 10.0},
            "next_lr": 1e-3,
            "samples": "00ff",
            "generators": {"cpu": f"{rank}ab"},
        }
        place = {
            "rank": rank,
            "tp": tp,
            "pp": pp,
            "dp": 0,
            "precision": "fp32",
            "shape": SHAPE,
            "parts": parts,
        }
        fingerprints.append(
            json.loads(json.dumps({**fixed, **loose, **place, "optimizer": optimizer, **facts}))
        )
    return fingerprints


def put(folder: Path, fingerprints: Prints) -> Path:
    folder.mkdir(parents=True)
    for values in fingerprints:
        (folder / file_of(values["rank"])).write_text(json.dumps(values))
    return folder


def saved(run: Path, fingerprints: Prints, iteration: int = 10, **identity: Any) -> Path:
    """A run folder with a checkpoint, of fingerprints alone."""
    folder = put(run / f"checkpoints/iter_{iteration:07d}", fingerprints)
    content = {
        "identity": {"shape": SHAPE, **identity},
        "iteration": iteration,
        "consumed_samples": 80,
        "files": {},
    }
    content |= {"layout": ["megatron", 2, 2, 1, 1], "scalars": {"step": 10.0}, "tensors": {}}
    checkpoints.write_manifest(folder, content)
    return run


def loaded(run: Path, fingerprints: Prints) -> Path:
    put(run / "fingerprints/load_0000010", fingerprints)
    return run


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return saved(tmp_path / "before", prints(state()))


def remade(
    name: str, rank: int | None, change: Callable[[np.ndarray], np.ndarray], *kinds: str
) -> Prints:
    """Fingerprints in which that tensor is another, on one rank or on all."""
    tensors = state()
    tensors |= {(name, kind): change(tensors[name, kind]).astype(np.float32) for kind in kinds}
    pairs = zip(prints(state()), prints(tensors), strict=True)
    return [other if rank in (None, other["rank"]) else plain for plain, other in pairs]


def edited(rank: int, **values: Any) -> Prints:
    fingerprints = prints(state())
    fingerprints[rank] |= values
    return fingerprints


def decaying() -> Prints:
    fingerprints = prints(state())
    next(p for p in fingerprints[0]["parts"] if p["name"] == NORM)["decay"] = 0.1
    return fingerprints


def copied(size: float) -> Prints:
    """The model computes with weights that are that far from the optimizer's."""
    fingerprints, tensors = (
        prints(state()),
        prints({k: x * np.float32(1 + size) for k, x in state().items()}),
    )
    for fingerprint, other in zip(fingerprints, tensors, strict=True):
        for part, moved in zip(fingerprint["parts"], other["parts"], strict=True):
            part["marks"][COPY] = moved["marks"]["weight"]
    return fingerprints


def kinds_of(findings: Iterable[RestartFinding]) -> list[tuple[str, str, set[int]]]:
    return [(f.kind, f.tensor, {r.rank for r in f.ranks}) for f in findings]


ALL = {0, 1, 2, 3}
LOST = {  # what was loaded; the findings, or some of them
    "nothing": (lambda: prints(state()), []),
    "nothing, by a rank that updates no parameters": (lambda: edited(3, scalars={"step": 0.0}), []),
    "a norm reset": (
        lambda: remade(FINAL, None, np.ones_like, "weight"),
        [("reset", FINAL, {2, 3})],
    ),
    "a norm apart across TP": (
        lambda: remade(NORM, 1, lambda x: x + 1e-3, "weight"),
        [("tensor-replicas", NORM, {1})],
    ),
    "tied copies apart": (
        lambda: remade(WORD, 2, lambda x: x[::-1, ::-1], "weight", "exp_avg"),
        [("tied", WORD, {2})],
    ),
    "one value of a matrix": (
        lambda: remade(MATRIX, None, lambda x: x + (x == x.max()) * 1e-6, "weight"),
        [("not-restored", MATRIX, {2})],
    ),
    "a norm that decays": (decaying, [("decay", NORM, {0})]),
    "a model that computes with other weights": (
        lambda: copied(0.05),
        [("copy", WORD, ALL), ("copy", NORM, {0, 1})],
    ),
    "a model that computes with rounded ones": (lambda: copied(0.01), []),
    "a generator": (lambda: edited(3, generators={"cpu": "other"}), [("generators", "", {3})]),
    "the next samples": (lambda: edited(1, samples="0001"), [("data", "", {1})]),
    "a learning rate of another order": (lambda: prints(state(), next_lr=1e-3 * (1 + 1e-10)), []),
    "Adam's step": (lambda: prints(state(), scalars={"step": 0.0}), [("optimizer", "", set())]),
    "the learning rate": (lambda: prints(state(), next_lr=1.001e-3), [("optimizer", "", set())]),
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_restart_lost_is_named_with_its_tensor_and_ranks(
    name: str, before: Path, tmp_path: Path
) -> None:
    fingerprints, expected = LOST[name]
    found = kinds_of(compare_restart(before, loaded(tmp_path / "after", fingerprints())).findings)
    assert all(finding in found for finding in expected) and bool(found) is bool(expected), found
    assert name != "a generator" or len(found) == 1


@pytest.mark.parametrize(("tensor", "found"), [(NORM, 0), (MATRIX, 1)])
def test_between_two_runs_matrices_count_and_norms_do_not(
    tensor: str, found: int, before: Path, tmp_path: Path
) -> None:
    """Adam scales a gradient that is 0 but for rounding to a whole step: small tensors differ
    between equal runs.
    """
    other = saved(tmp_path / "other", remade(tensor, None, lambda x: x * 1.1, "weight"))
    assert len(compare_restart(before, other).findings) == found


def test_ranks_without_a_fingerprint_are_noted_and_their_tensors_not_compared(
    before: Path, tmp_path: Path
) -> None:
    """TP 2 before, of which one rank left nothing; TP 1 after, where each tensor is whole."""
    partial = loaded(tmp_path / "partial", prints(state())[:3])
    whole = []
    for pp in (0, 1):
        fingerprint = prints(state(), layout=["megatron", 1, 2, 1, 1], world=2)[2 * pp]
        for part in fingerprint["parts"]:
            box = tuple((0, n) for n in MODEL[part["name"]][0])
            part |= {
                "box": box,
                "marks": {k: mark(state()[part["name"], k], box).to_json() for k in KINDS},
            }
        whole.append(json.loads(json.dumps(fingerprint | {"rank": pp, "tp": 0})))
    for one, two in ((before, partial), (partial, loaded(tmp_path / "after", whole))):
        found = compare_restart(one, two)
        assert not found.findings and "no fingerprint of ranks 3" in found.notes[0]


def test_the_command_prints_it_in_lines_and_as_json(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = (
        loaded(tmp_path / "after", prints(state())),
        put(tmp_path / "broken", LOST["a norm reset"][0]()),
    )
    assert (
        main(["debug", "restart", str(before), str(whole)]) == 0
        and "nothing is wrong" in capsys.readouterr().out
    )
    assert main(["debug", "restart", str(before), str(broken)]) == 1
    first, line, last = capsys.readouterr().out.splitlines()
    assert (first, last) == (
        "compared before/iter_0000010 (saved) with broken (loaded)",
        "1 findings",
    )
    assert main(["debug", "restart", str(before), str(broken), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert line == f"  reset: {FINAL}, ranks 2-3 (pp 1, dp 0): {finding['what']}"
    away = f"weight is {100 * finding['size']:.3g} % of its norm away from what was saved"
    assert finding["what"] == f"{away}: every element is 1, its default"
    ranks = [{"rank": rank, "tp": rank - 2, "pp": 1, "dp": 0} for rank in (2, 3)]
    assert (finding["kind"], finding["tensor"], finding["ranks"]) == ("reset", FINAL, ranks)


def half(folder: Path) -> None:
    path = put(folder, prints(state())) / file_of(2)
    path.write_text(path.read_text()[:-200])


BAD = {
    "missing": (lambda folder: None, "B={B}: no such folder"),
    "empty": (
        lambda folder: folder.mkdir(),
        "B={B}: holds no complete checkpoint with fingerprints (a run folder",
    ),
    "a file": (lambda folder: folder.write_text(""), "B={B}: is a file; a folder is needed"),
    "another model": (
        lambda folder: put(folder, prints(state(), shape={**SHAPE, "hidden_size": 12})),
        "B hidden_size=12: before/iter_0000010 has 6: two models cannot be compared",
    ),
    "half-written": (half, "fingerprint={B}/fingerprint_00002.json: is damaged or half-written"),
}


@pytest.mark.parametrize(("make", "line_start"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(
    make: Callable[[Path], Any],
    line_start: str,
    before: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    make(tmp_path / "B")
    assert main(["debug", "restart", str(before), str(tmp_path / "B")]) == 2
    line = capsys.readouterr().err
    assert (
        line.startswith("trilane: " + line_start.format(B=tmp_path / "B")) and line.count("\n") == 1
    )


def adam(
    tensors: Tensors, gradient: Tensors, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95)
) -> Tensors:
    """One step of Adam (Kingma and Ba 2015), without its bias correction."""
    made: Tensors = {}
    for name in MODEL:
        w, m, v = (tensors[name, kind].astype(np.float64) for kind in KINDS)
        g = gradient[name, "exp_avg"].astype(np.float64)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        values = zip(KINDS, (w - lr * m / (v**0.5 + 1e-8), m, v), strict=True)
        made |= {(name, kind): x.astype(np.float32) for kind, x in values}
    return made


GRADIENT = drawn(5)
STEPS: dict[
    str, tuple[Callable[[Tensors], Tensors], str, float | None]
] = {  # the finding, and its size
    "none": (lambda start: adam(start, GRADIENT), "", None),
    "a rate from zero": (lambda start: adam(start, GRADIENT, lr=1e-5), "rate", 0.01),
    "a rate by a hundredth": (lambda start: adam(start, GRADIENT, lr=1.012e-3), "rate", 1.012),
    "a rate by less": (lambda start: adam(start, GRADIENT, lr=1.008e-3), "", None),
    "another beta1": (lambda start: adam(start, GRADIENT, betas=(0.8, 0.95)), "moments", 0.8),
    "a beta1 that is near": (
        lambda start: adam(start, GRADIENT, betas=(0.905, 0.95)),
        "moments",
        0.905,
    ),
    "a beta1 that is nearer": (lambda start: adam(start, GRADIENT, betas=(0.9006, 0.95)), "", None),
    "another beta2": (lambda start: adam(start, GRADIENT, betas=(0.9, 0.99)), "moments", None),
    "no moments": (
        lambda start: adam({k: v * (k[1] == "weight") for k, v in start.items()}, GRADIENT),
        "moments",
        0,
    ),
    "other samples": (lambda start: adam(start, drawn(10)), "gradients", None),
    "larger gradients": (
        lambda start: adam(start, {k: 1.02 * v for k, v in GRADIENT.items()}),
        "gradients",
        1.02,
    ),
}


@pytest.mark.parametrize(("step", "kind", "size"), STEPS.values(), ids=STEPS.keys())
def test_what_differs_in_the_step_after_a_load_is_named(
    step: Callable[[Tensors], Tensors], kind: str, size: float | None, before: Path, tmp_path: Path
) -> None:
    """By the fingerprints alone: both runs begin at the same state, and saved after one iteration
    more.
    """
    more = {"iteration": 11, "consumed_samples": 88, "scalars": {"step": 11.0}}
    saved(before, prints(adam(state(), GRADIENT), **more), 11)
    after = saved(loaded(tmp_path / "after", prints(state())), prints(step(state()), **more), 11)
    found = compare_restart(before, after).findings
    assert [f.kind for f in found] == [kind] * bool(kind)
    assert not compare_restart(saved(tmp_path / "short", prints(state())), after).findings, (
        "of no such step"
    )
    assert size is None or found[0].size == pytest.approx(size, rel=1e-3, abs=1e-4)


def test_marks_of_parts_add_up_to_the_mark_of_the_whole() -> None:
    """In hash to the bit, however it is cut; and other bits are another hash."""
    x = np.random.default_rng(1).normal(size=(70, 90)).astype(np.float32)
    whole, parts = mark(x, ((0, 70), (0, 90))), []
    for rows, columns in (((0, 33), (0, 90)), ((33, 70), (0, 41)), ((33, 70), (41, 90))):
        parts.append(mark(x[slice(*rows), slice(*columns)], (rows, columns)))
    added = parts[2] + parts[1] + parts[0]
    assert added.hash == whole.hash and added.apart(whole) == 0 and not added.constant(x[0, 0])
    assert added.norm == pytest.approx(np.linalg.norm(x), rel=1e-6) and (added.low, added.high) == (
        x.min(),
        x.max(),
    )
    zero = mark(0 * x, ((0, 70), (0, 90)))  # of eight sketches the estimate is about a quarter off
    assert whole.apart(zero) == pytest.approx(1, abs=0.5) == zero.apart(whole), (
        "relative to the larger norm"
    )
    x[3, 4], x[4, 3] = x[4, 3], x[3, 4]
    assert mark(x, ((0, 70), (0, 90))).hash != whole.hash


def test_marks_of_replicas_that_divide_a_part_add_up_to_those_of_it() -> None:
    """ZeRO's ranges need not end with a row; without one of them only the copies, whole on each,
    are known.
    """
    box, x = ((2, 8), (0, 5)), np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32)
    whole = Part(
        name="w",
        shape=(9, 5),
        box=box,
        decay=None,
        marks={"weight": mark(x, box), COPY: mark(x, box)},
    )
    replicas = []
    for shard in ((7, 30), (0, 7), (0, 0)):
        inside = np.zeros(30, np.float32)
        inside[slice(*shard)] = x.reshape(-1)[
            slice(*shard)
        ]  # a zero adds nothing to hash and sketch
        marks = {"weight": mark(inside.reshape(6, 5), box)} if shard[1] else {}
        replicas.append(replace(whole, shard=shard, marks={**marks, COPY: whole.marks[COPY]}))
    for part in whole_parts(replicas):
        assert part.shard is None and part.marks["weight"].hash == whole.marks["weight"].hash
        assert (
            part.marks["weight"].apart(whole.marks["weight"]) < 1e-6
            and part.marks[COPY] == whole.marks[COPY]
        )
    assert [{*part.marks} for part in whole_parts(replicas[1:])] == [{COPY}, {COPY}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUGS)
def test_a_bug_planted_into_a_real_engine_is_named(
    kind: str, pool: WorkerPool, tmp_path: Path
) -> None:
    bug = BUGS[kind]
    found = cycle(pool, tmp_path / "r", bug.topology, kind)
    assert named(bug, found), [f.line() for f in found.findings]


@pytest.mark.slow
def test_nothing_is_found_in_a_clean_cycle_with_dropout(pool: WorkerPool, tmp_path: Path) -> None:
    assert not cycle(pool, tmp_path / "r", CLEAN).findings
