"""What a restart lost is named, by rank and tensor, from fingerprints or from the slices of a checkpoint alone."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from restart_plants import BUGS, CYCLES, asked, cycle, named
from support import REPOSITORY, small_plan

from trilane.cli.app import main
from trilane.config.plan import read_plan
from trilane.diagnose.restart.compare import compare_restart
from trilane.experiments import rehearse
from trilane.experiments.parity import WorkerPool, machine, rows
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import COPY, Part, file_of, mark, must_decay, whole_parts

# A model of four tensors on TP 2 x PP 2: name -> shape, the dimension that is cut, the stages that hold it.
MODEL: dict[str, tuple[tuple[int, ...], int | None, tuple[int, ...]]] = {
    "embedding.word_embeddings.weight": ((8, 6), 0, (0, 1)),
    "decoder.layers.0.input_layernorm.weight": ((6,), None, (0,)),
    "decoder.layers.1.mlp.linear_fc2.weight": ((6, 10), 1, (1,)),
    "decoder.final_layernorm.weight": ((6,), None, (1,)),
}
SHAPE = {"hidden_size": 6, "num_layers": 2}
WORD, NORM, _, FINAL = MODEL
Tensors = dict[tuple[str, str], np.ndarray]


def state() -> Tensors:
    """Each tensor's three kinds, after ten steps whose clipped gradients had a norm of 1."""
    random = np.random.default_rng(7)
    made = {(n, k): random.normal(size=s).astype(np.float32) for n, (s, _, _) in MODEL.items() for k in KINDS}
    squares = {n: made[n, "exp_avg_sq"] ** 2 for n in MODEL}
    mean = (1 - 0.95**10) / sum(float(v.sum()) for v in squares.values())
    return made | {(n, "exp_avg_sq"): (v * mean).astype(np.float32) for n, v in squares.items()}


def box_of(name: str, tp: int) -> tuple[tuple[int, int], ...]:
    shape, dim, _ = MODEL[name]
    return tuple((n // 2 * tp, n // 2 * (tp + 1)) if d == dim else (0, n) for d, n in enumerate(shape))


def cut(whole: np.ndarray, box: tuple[tuple[int, int], ...]) -> np.ndarray:
    return whole[tuple(slice(first, end) for first, end in box)]


def prints(tensors: Tensors, **facts: Any) -> list[dict[str, Any]]:
    """The fingerprints of four ranks that hold the tensors."""
    fingerprints = []
    for rank in range(4):
        tp, pp = rank % 2, rank // 2
        parts = []
        for name in (n for n, (_, _, stages) in MODEL.items() if pp in stages):
            box = box_of(name, tp)
            marks = {kind: mark(cut(tensors[name, kind], box), box) for kind in KINDS}
            decay = 0.0 if "layernorm" in name else 0.1
            parts.append(Part(name=name, shape=MODEL[name][0], box=box, decay=decay, marks=marks).to_json())
        optimizer = {"clip_grad": 1.0, "adam_beta2": 0.95, "weight_decay": 0.1}
        fixed = {"iteration": 10, "consumed_samples": 80, "layout": ["megatron", 2, 2, 1, 1], "world": 4}
        loose = {"scalars": {"step": 10.0}, "next_lr": 1e-3, "samples": "00ff", "generators": {"cpu": f"{rank}ab"}}
        place = {"rank": rank, "tp": tp, "pp": pp, "dp": 0, "precision": "fp32", "shape": SHAPE, "parts": parts}
        fingerprints.append(json.loads(json.dumps({**fixed, **loose, **place, "optimizer": optimizer, **facts})))
    return fingerprints


def put(folder: Path, fingerprints: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    for values in fingerprints:
        (folder / file_of(values["rank"])).write_text(json.dumps(values))
    return folder


def saved(run: Path, tensors: Tensors, fingerprints: list[dict[str, Any]] | None) -> Path:
    """A run folder with one checkpoint; without fingerprints where `fingerprints` is None."""
    folder = put(run / "checkpoints/iter_0000010", fingerprints or [])
    listed: dict[str, Any] = {}
    files: dict[str, Any] = {}
    for tp in (0, 1):
        data = b""
        for name, (shape, dim, _) in MODEL.items():
            if dim is None and tp:
                continue
            box, at = box_of(name, tp), {}
            for kind in KINDS:
                at[kind] = len(data)
                data += np.ascontiguousarray(cut(tensors[name, kind], box)).tobytes()
            piece = {"box": box, "file": f"rank_{tp:05d}.safetensors", "at": at}
            listed.setdefault(name, {"shape": shape, "slices": []})["slices"].append(piece)
        path = folder / f"rank_{tp:05d}.safetensors"
        path.write_bytes(data)
        files[path.name] = [len(data), checkpoints.digest(path)]
    content = {"identity": {"shape": SHAPE}, "layout": ["megatron", 2, 2, 1, 1], "iteration": 10}
    content |= {"consumed_samples": 80, "scalars": {"step": 10.0}, "tensors": listed, "files": files}
    checkpoints.write_manifest(folder, json.loads(json.dumps(content)))
    return run


@pytest.fixture
def before(tmp_path: Path) -> Path:
    return saved(tmp_path / "before", state(), prints(state()))


def after(tmp_path: Path, fingerprints: list[dict[str, Any]]) -> Path:
    put(tmp_path / "after/fingerprints/load_0000010", fingerprints)
    return tmp_path / "after"


def remade(name: str, rank: int | None, change: Callable[[np.ndarray], np.ndarray], *kinds: str) -> Any:
    """Fingerprints in which that tensor is another, on one rank or on all."""
    tensors = state()
    for kind in kinds:
        tensors[name, kind] = change(tensors[name, kind]).astype(np.float32)
    plain, other = prints(state()), prints(tensors)
    return [o if rank in (None, o["rank"]) else p for p, o in zip(plain, other, strict=True)]


def edited(rank: int, change: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    fingerprints = prints(state())
    change(fingerprints[rank])
    return fingerprints


def decays(fingerprint: dict[str, Any]) -> None:
    next(p for p in fingerprint["parts"] if p["name"] == NORM)["decay"] = 0.1


LOST = {
    "a norm reset": (remade(FINAL, None, np.ones_like, "weight"), "reset", FINAL, {2, 3}),
    "a norm apart across TP": (remade(NORM, 1, lambda x: x + 1e-3, "weight"), "tensor-replicas", NORM, {1}),
    "tied copies apart": (remade(WORD, 2, lambda x: x[::-1, ::-1], "weight", "exp_avg"), "tied", WORD, {2}),
    "one value of a matrix": (
        remade("decoder.layers.1.mlp.linear_fc2.weight", None, lambda x: x + (x == x.max()) * 1e-6, "weight"),
        "not-restored",
        "decoder.layers.1.mlp.linear_fc2.weight",
        {2},
    ),
    "a norm that decays": (edited(0, decays), "decay", NORM, {0}),
    "gradients beyond the limit": (remade(FINAL, None, lambda x: x + 1, "exp_avg_sq"), "clipping", "", {2, 3}),
    "a generator": (
        edited(3, lambda fingerprint: fingerprint.update(generators={"cpu": "other"})),
        "generators",
        "",
        {3},
    ),
    "the next samples": (edited(1, lambda fingerprint: fingerprint.update(samples="0001")), "data", "", {1}),
    "consumed samples": (prints(state(), consumed_samples=0), "data", "", set()),
    "Adam's step": (prints(state(), scalars={"step": 0.0}), "optimizer", "", set()),
    "the learning rate": (prints(state(), next_lr=2e-3), "optimizer", "", set()),
}


@pytest.mark.parametrize(("fingerprints", "kind", "tensor", "ranks"), LOST.values(), ids=LOST.keys())
def test_what_a_restart_lost_is_named_with_its_tensor_and_ranks(
    fingerprints: list[dict[str, Any]], kind: str, tensor: str, ranks: set[int], before: Path, tmp_path: Path
) -> None:
    found = compare_restart(before, after(tmp_path, fingerprints)).findings
    assert (kind, tensor, ranks) in [(f.kind, f.tensor, {r.rank for r in f.ranks}) for f in found], found


def test_nothing_is_found_where_all_came_back_nor_from_the_slices_alone(before: Path, tmp_path: Path) -> None:
    whole = after(tmp_path, prints(state()))
    bare = saved(tmp_path / "bare", state(), None)
    assert not compare_restart(before, whole).findings
    assert not compare_restart(bare, whole).findings and "has no fingerprints" in compare_restart(bare, whole).notes[0]
    lost = put(tmp_path / "lost", remade(FINAL, None, np.ones_like, "weight"))
    assert {f.kind for f in compare_restart(bare, lost).findings} == {"reset"}


def test_a_checkpoint_that_nobody_trained_has_no_layout_and_is_compared_as_wholes(tmp_path: Path) -> None:
    run = saved(tmp_path / "imported", state(), None)
    folder = run / "checkpoints/iter_0000010"
    checkpoints.write_manifest(folder, {**checkpoints.read_manifest(folder), "layout": None})
    assert not compare_restart(run, after(tmp_path, prints(state()))).findings


def test_a_clipping_left_out_at_one_end_is_distinguished_from_a_sum_left_out(before: Path, tmp_path: Path) -> None:
    found = compare_restart(before, after(tmp_path, remade(WORD, 3, lambda x: 3 * x, "exp_avg"))).findings
    assert "3 times as large: clipped" in next(f for f in found if f.kind == "tied").what


@pytest.mark.parametrize(("limit", "found"), [(1.0, 0), (0.99, 0), (0.97, 1)])
def test_a_norm_that_is_rounded_in_half_precision_is_clipped_to_within_two_percent(
    limit: float, found: int, tmp_path: Path
) -> None:
    """The steps' norms were 1."""
    optimizer = {"clip_grad": limit, "adam_beta2": 0.95, "weight_decay": 0.1}
    before = saved(tmp_path / "before", state(), prints(state(), optimizer=optimizer))
    findings = compare_restart(before, after(tmp_path, prints(state(), optimizer=optimizer))).findings
    assert [f.kind for f in findings] == ["clipping"] * found


@pytest.mark.parametrize(("rate", "found"), [(1e-3, 0), (1.001e-3, 1), (0.999e-3, 1)])
def test_a_learning_rate_that_is_a_thousandth_off_is_another_schedule(
    rate: float, found: int, before: Path, tmp_path: Path
) -> None:
    findings = compare_restart(before, after(tmp_path, prints(state(), next_lr=rate))).findings
    assert [f.kind for f in findings] == ["optimizer"] * found


def test_a_rank_that_updates_nothing_has_taken_no_steps_and_is_no_finding(before: Path, tmp_path: Path) -> None:
    """With many replicas some hold no share of the optimizer."""
    fingerprints = edited(0, lambda fingerprint: fingerprint.update(scalars={"step": 0.0}))
    assert not compare_restart(before, after(tmp_path, fingerprints)).findings


def test_marks_of_replicas_that_divide_a_part_add_up_to_those_of_it() -> None:
    """ZeRO's ranges need not end with a row; without one of them only the copies, whole on each, are known."""
    box, x = ((2, 8), (0, 5)), np.random.default_rng(1).standard_normal((6, 5)).astype(np.float32)
    whole = Part(name="w", shape=(9, 5), box=box, decay=None, marks={"weight": mark(x, box), COPY: mark(x, box)})
    replicas = []
    for shard in ((7, 30), (0, 7), (0, 0)):
        inside = np.zeros(30, np.float32)
        inside[slice(*shard)] = x.reshape(-1)[slice(*shard)]  # a zero adds nothing to hash and sketch
        marks = {"weight": mark(inside.reshape(6, 5), box)} if shard[1] else {}
        replicas.append(replace(whole, shard=shard, marks={**marks, COPY: whole.marks[COPY]}))
    for part in whole_parts(replicas):
        assert part.shard is None and part.marks["weight"].hash == whole.marks["weight"].hash
        assert part.marks["weight"].apart(whole.marks["weight"]) < 1e-6 and part.marks[COPY] == whole.marks[COPY]
    assert [{*part.marks} for part in whole_parts(replicas[1:])] == [{COPY}, {COPY}]


def test_a_tensor_of_which_a_rank_is_missing_is_not_compared_with_a_whole_one(tmp_path: Path) -> None:
    """TP 2 before, of which one rank left nothing; TP 1 after, where each tensor is whole."""
    before = put(tmp_path / "before/fingerprints/load_0000010", prints(state())[:3])
    whole = []
    for pp in (0, 1):
        fingerprint = prints(state(), layout=["megatron", 1, 2, 1, 1], world=2)[2 * pp]
        for part in fingerprint["parts"]:
            box = tuple((0, n) for n in MODEL[part["name"]][0])
            marks = {kind: mark(state()[part["name"], kind], box).to_json() for kind in KINDS}
            part |= {"box": box, "marks": marks}
        whole.append(json.loads(json.dumps(fingerprint | {"rank": pp, "tp": 0})))
    found = compare_restart(before.parent.parent, after(tmp_path, whole))
    assert not found.findings and "no fingerprint of rank 3" in found.notes[0]


@pytest.mark.parametrize(("tensor", "found"), [(NORM, 0), ("decoder.layers.1.mlp.linear_fc2.weight", 1)])
def test_between_two_runs_matrices_count_and_norms_do_not(
    tensor: str, found: int, before: Path, tmp_path: Path
) -> None:
    """Adam scales a gradient that is 0 but for rounding to a whole step: small tensors differ between equal runs."""
    tensors = state()
    tensors[tensor, "weight"] = (tensors[tensor, "weight"] * 1.1).astype(np.float32)
    other = saved(tmp_path / "other", tensors, prints(tensors))
    assert len(compare_restart(before, other).findings) == found


def test_a_layernorm_and_a_bias_must_not_decay_and_matrices_and_embeddings_must() -> None:
    """Megatron-LM: no weight decay for one-dimensional parameters (its get_param_groups)."""
    assert not any(map(must_decay, (NORM, FINAL, "decoder.layers.0.self_attention.linear_qkv.bias")))
    assert all(
        map(must_decay, (WORD, "embedding.position_embeddings.weight", "decoder.layers.1.mlp.linear_fc2.weight"))
    )


def test_the_mark_of_two_parts_has_the_range_of_both() -> None:
    parts = [np.array([[5.0, 6.0]], np.float32), np.array([[1.0, 9.0]], np.float32)]
    one, two = mark(parts[0], ((0, 1), (0, 2))), mark(parts[1], ((1, 2), (0, 2)))
    for added in (one + two, two + one):
        assert (added.low, added.high, added.total) == (1, 9, 21)
        assert not added.constant(5.0)


def test_a_tensor_that_was_reset_is_as_far_away_as_it_was_large_whichever_is_the_larger() -> None:
    """Relative to the larger norm, so that nothing is much further apart than two unrelated tensors, about 1."""
    x, box = np.random.default_rng(3).normal(size=(50, 60)).astype(np.float32), ((0, 50), (0, 60))
    small = mark(np.float32(1e-3) * x, box)
    assert mark(x, box).apart(small) == small.apart(mark(x, box)) == pytest.approx(0.999, rel=0.6)


def test_ranks_without_a_fingerprint_are_noted_and_the_others_compared(before: Path, tmp_path: Path) -> None:
    found = compare_restart(before, after(tmp_path, prints(state())[:2]))
    assert not found.findings and "load_0000010: no fingerprint of rank 2, 3" in found.notes[0]


def test_the_command_prints_it_in_lines_and_as_json(
    before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, broken = after(tmp_path, prints(state())), put(tmp_path / "broken", LOST["a norm reset"][0])
    assert main(["debug", "restart", str(before), str(whole)]) == 0 and "nothing is wrong" in capsys.readouterr().out
    assert main(["debug", "restart", str(before), str(broken)]) == 1
    assert "reset: decoder.final_layernorm.weight, ranks 2-3 (pp 1, dp 0): weight was" in capsys.readouterr().out
    assert main(["debug", "restart", str(before), str(broken), "--json"]) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert (finding["kind"], [r["rank"] for r in finding["ranks"]]) == ("reset", [2, 3])


def half(folder: Path) -> None:
    path = put(folder, prints(state())) / file_of(2)
    path.write_text(path.read_text()[:-200])


def no_manifest(folder: Path) -> None:
    run = saved(folder, state(), prints(state()))
    (run / "checkpoints/iter_0000010/manifest.json").write_text("{")


def short(folder: Path) -> None:
    file = saved(folder, state(), None) / "checkpoints/iter_0000010/rank_00001.safetensors"
    file.write_bytes(file.read_bytes()[:-4])


BAD = {
    "missing": (lambda folder: None, "B={B}: no such folder"),
    "empty": (lambda folder: folder.mkdir(), "B={B}: holds no complete checkpoint and no fingerprints (a run folder"),
    "a file": (lambda folder: folder.write_text(""), "B={B}: is a file; a folder is needed"),
    "another model": (
        lambda folder: put(folder, prints(state(), shape={**SHAPE, "hidden_size": 12})),
        "B hidden_size=12: before/iter_0000010 has 6: two models cannot be compared",
    ),
    "half-written": (half, "fingerprint={B}/fingerprint_00002.json: is damaged or half-written"),
    "no numbers": (
        lambda folder: put(folder, prints(state(), iteration=None)),
        "fingerprint={B}/fingerprint_00000.json: is damaged or half-written",
    ),
    "damaged manifest": (no_manifest, "checkpoint={B}/checkpoints/iter_0000010: manifest.json is damaged"),
    "short slices": (short, "checkpoint={B}/checkpoints/iter_0000010: rank_00001.safetensors is missing or cut short"),
}


@pytest.mark.parametrize(("make", "line_start"), BAD.values(), ids=BAD.keys())
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(
    make: Callable[[Path], Any], line_start: str, before: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "B")
    assert main(["debug", "restart", str(before), str(tmp_path / "B")]) == 2
    line = capsys.readouterr().err
    assert line.startswith("trilane: " + line_start.format(B=tmp_path / "B")) and line.count("\n") == 1


def test_marks_of_parts_add_up_to_the_mark_of_the_whole() -> None:
    """In hash to the bit, however it is cut; and other bits are another hash."""
    x = np.random.default_rng(1).normal(size=(70, 90)).astype(np.float32)
    whole, parts = mark(x, ((0, 70), (0, 90))), []
    for rows_, columns in (((0, 33), (0, 90)), ((33, 70), (0, 41)), ((33, 70), (41, 90))):
        parts.append(mark(x[slice(*rows_), slice(*columns)], (rows_, columns)))
    added = parts[0] + parts[1] + parts[2]
    assert added.hash == whole.hash and added.apart(whole) == 0
    assert added.norm == pytest.approx(np.linalg.norm(x), rel=1e-6) and added.low == x.min()
    x[3, 4], x[4, 3] = x[4, 3], x[3, 4]
    assert mark(x, ((0, 70), (0, 90))).hash != whole.hash


@pytest.mark.parametrize("size", [1e-4, 1e-2, 0.3])
def test_marks_estimate_how_far_two_tensors_are_apart(size: float) -> None:
    """Within a factor of two, where eight sketches have a standard error of a quarter."""
    random = np.random.default_rng(5)
    x, noise = (random.normal(size=(200, 300)).astype(np.float32) for _ in range(2))
    box = ((0, 200), (0, 300))
    assert size / 2 < mark(x, box).apart(mark(x + np.float32(size) * noise, box)) < 2 * size


@pytest.mark.parametrize("row", rows(), ids=lambda row: row.label)
def test_a_rehearsal_keeps_the_topology_of_every_plan_of_the_equality_table(row: Any, tmp_path: Path) -> None:
    plan = row.plan(machine(cards=0, bf16=True), str(tmp_path))
    tiny = rehearse.shrink(plan, tmp_path, plan.cluster, 8).plan
    kept = ("tp", "pp", "dp", "zero", "interleaving", "partition", "offload", "precision", "sequence_parallel")
    assert [getattr(tiny.topology, n) for n in kept] == [getattr(plan.topology, n) for n in kept]
    assert tiny.engine == plan.engine and tiny.shape.parameters <= plan.shape.parameters


def test_a_plan_of_384_gpus_is_refused_here_and_prepared_for_its_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = REPOSITORY / "docs/plan-176b.json"
    plan = read_plan(path)
    t = plan.topology
    assert main(["debug", "rehearse", str(path)]) == 2
    problem = (
        f"trilane: tp x pp={t.tp * t.pp}: one replica has more than the 8 processes of this machine; see --prepare"
    )
    assert capsys.readouterr().err.startswith(problem)
    assert main(["debug", "rehearse", str(path), "--prepare", str(tmp_path / "r")]) == 0
    first = read_plan(tmp_path / "r/first/plan.json")
    second = read_plan(tmp_path / "r/second/plan.json")
    assert first.topology.gpus == t.gpus and first.shape.parameters < 1e8
    assert second.run.load == str(tmp_path / "r/first/checkpoints/iter_0000001")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"srun --ntasks {t.gpus}") and lines[2].startswith("trilane debug restart ")
    assert main(["debug", "rehearse", str(path), "--prepare", str(tmp_path / "r")]) == 2


def test_replicas_that_this_machine_has_no_room_for_are_left_out_and_reported(tmp_path: Path) -> None:
    plan = small_plan()
    plan = replace(plan, topology=replace(plan.topology, tp=2, dp=4, gbs=8))
    made = rehearse.shrink(plan, tmp_path, plan.cluster, 4)
    assert made.plan.topology.dp == 2 and made.notes == ("dp=2 instead of 4: this machine runs at most 4 processes",)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*list(BUGS)[:8], "accumulation halved"])
def test_a_bug_planted_into_a_real_engine_is_named(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    bug = BUGS[kind]
    found = cycle(pool, tmp_path / "r", bug.topology, None, kind)
    assert named(bug, found), [f.line() for f in found.findings]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*list(CYCLES)[:-1:3], list(CYCLES)[-1]])
def test_nothing_is_found_in_a_clean_cycle(kind: str, pool: WorkerPool, tmp_path: Path) -> None:
    """Four of the ten that docs/restarts.md lists (the script does all), and one whose weights are gathered late."""
    assert not cycle(pool, tmp_path / "r", *CYCLES[kind], "").findings


@pytest.mark.slow
@pytest.mark.usefixtures("uncounted_processes")
def test_a_plan_is_rehearsed_in_processes_of_its_own(data: Path, tmp_path: Path) -> None:
    """As the command does it; a bug in it would be the planted ones' business."""
    made = asked(data, tmp_path, {})
    done = rehearse.rehearse(made, tmp_path / "r", rehearse.train_here)
    assert not done.problem and done.audit and not done.audit.findings
    assert len(done.audit.compared) == 2
    shutil.rmtree(tmp_path / "r")


def states(run: Path, first: Tensors, second: Tensors) -> Path:
    """A run folder with checkpoints of iterations 10 and 11, of one rank each."""
    for number, tensors in ((10, first), (11, second)):
        fingerprints = prints(tensors, iteration=number, consumed_samples=8 * number, scalars={"step": float(number)})
        place = saved(run / f"of_{number}", tensors, fingerprints) / "checkpoints/iter_0000010"
        (run / "checkpoints").mkdir(parents=True, exist_ok=True)
        checkpoints.write_manifest(place, checkpoints.read_manifest(place) | {"iteration": number})
        place.rename(run / f"checkpoints/iter_{number:07d}")
        shutil.rmtree(run / f"of_{number}")
    return run


def adam(tensors: Tensors, gradient: Tensors, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95)) -> Tensors:
    """One step of Adam (Kingma and Ba 2015), without its bias correction."""
    made: Tensors = {}
    for name in MODEL:
        w, m, v = (tensors[name, kind].astype(np.float64) for kind in KINDS)
        g = gradient[name, "exp_avg"].astype(np.float64)
        m, v = betas[0] * m + (1 - betas[0]) * g, betas[1] * v + (1 - betas[1]) * g * g
        made |= {
            (name, k): x.astype(np.float32) for k, x in zip(KINDS, (w - lr * m / (v**0.5 + 1e-8), m, v), strict=True)
        }
    return made


def drawn(seed: int) -> Tensors:
    random = np.random.default_rng(seed)
    made = {(n, k): random.normal(size=s).astype(np.float32) for n, (s, _, _) in MODEL.items() for k in KINDS}
    return made | {(n, "exp_avg_sq"): made[n, "exp_avg_sq"] ** 2 for n in MODEL}


def mixed(one: Tensors, other: Tensors, share: float) -> Tensors:
    return {key: (share * one[key] + (1 - share) * other[key]).astype(np.float32) for key in one}


GRADIENT, COMMON = drawn(5), drawn(8)
STEPS: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "none": (lambda start: adam(start, GRADIENT), ""),
    "a rate from zero": (lambda start: adam(start, GRADIENT, lr=1e-5), "rate"),
    "another beta1": (lambda start: adam(start, GRADIENT, betas=(0.8, 0.95)), "beta"),
    "another beta2": (lambda start: adam(start, GRADIENT, betas=(0.9, 0.99)), "beta"),
    "gradients twice as large": (lambda start: adam(start, {k: 2 * v for k, v in GRADIENT.items()}), "gradients"),
    "no moments": (lambda start: adam({k: v * (k[1] == "weight") for k, v in start.items()}, GRADIENT), "moments"),
    "part of the samples": (lambda start: adam(start, mixed(GRADIENT, drawn(9), 0.8)), "accumulation"),
    "other samples": (lambda start: adam(start, drawn(10)), "replayed"),
}


@pytest.mark.parametrize(("step", "kind"), STEPS.values(), ids=STEPS.keys())
def test_what_differs_in_the_step_after_a_load_is_named(
    step: Callable[[Tensors], Tensors], kind: str, tmp_path: Path
) -> None:
    """By the fingerprints alone: both runs begin at the same state, and saved after one iteration more."""
    start = state()
    before = states(tmp_path / "before", start, adam(start, GRADIENT))
    continued = states(tmp_path / "after", start, step(start))
    shutil.rmtree(continued / "checkpoints/iter_0000010")
    facts = {"adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1}
    put(continued / "fingerprints/load_0000010", prints(start, consumed_samples=80))
    for path in tmp_path.rglob("fingerprint_*.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"optimizer": facts}))
    found = compare_restart(before, continued).findings
    assert [f.kind for f in found if f.kind not in ("tied", "data-replicas")] == [kind] * bool(kind), found


def test_master_weights_rebuilt_from_half_precision_are_one_finding(before: Path, tmp_path: Path) -> None:
    def rounded(x: np.ndarray) -> np.ndarray:
        bits = x.view(np.uint32).astype(np.uint64) + 0x8000
        return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32)

    tensors = {key: rounded(v) if key[1] == "weight" else v for key, v in state().items()}
    (finding,) = compare_restart(before, after(tmp_path, prints(tensors))).findings
    assert finding.kind == "masters" and "rounding of bf16" in finding.what


def test_two_different_runs_are_named_as_such_by_what_they_record_or_by_their_weights(
    before: Path, tmp_path: Path
) -> None:
    other = saved(tmp_path / "other", state(), prints(state()))
    for run, seed in ((before, 1), (other, 2)):
        place = run / "checkpoints/iter_0000010"
        content = checkpoints.read_manifest(place)
        content["identity"] |= {"seed": seed, "data": {"source": "mock"}}
        checkpoints.write_manifest(place, content)
    (finding,) = compare_restart(before, other).findings
    assert finding.kind == "run" and "seed: 1 and 2" in finding.what
    kinds = {f.kind for f in compare_restart(before, after(tmp_path, prints(drawn(3)))).findings}
    assert kinds == {"run", "clipping"}, "clipping is of one state alone"
