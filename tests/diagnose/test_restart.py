"""What a restart lost is named, by rank and tensor, from fingerprints."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pool import WorkerPool
from restart_plants import BUGS, CLEAN, cycle, named

from trilane.cli.app import main
from trilane.workspace import checkpoints
from trilane.workspace.checkpoints import KINDS
from trilane.workspace.fingerprints import COPY, Mark, Part, file_of
from trilane_diagnose.restart import compare_restart
from trilane_engine.checkpoint import marks

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
LAYOUT = ["megatron", 2, 2, 1, 1]
FACTS: dict[str, Any] = {
    "iteration": 10,
    "consumed_samples": 80,
    "layout": LAYOUT,
    "world": 4,
    "scalars": {"step": 10.0},
    "next_lr": 1e-3,
    "samples": "00ff",
    "dp": 0,
    "precision": "fp32",
    "shape": SHAPE,
    "optimizer": {"clip_grad": 1.0, "adam_beta1": 0.9, "adam_beta2": 0.95, "weight_decay": 0.1},
}
Tensors = dict[tuple[str, str], np.ndarray]
Prints = list[dict[str, Any]]


def mark(part: np.ndarray, box: Any) -> Mark:
    return marks.mark(torch.from_numpy(np.ascontiguousarray(part, np.float32)), box)


def drawn(seed: int) -> Tensors:
    """Each tensor's three kinds."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, (shape, _, _) in MODEL.items():
        for kind in KINDS:
            tensors[name, kind] = random.normal(size=shape).astype(np.float32)
        tensors[name, "exp_avg_sq"] **= 2
    return tensors


STATE = drawn(7)


def prints(tensors: Tensors = STATE, **facts: Any) -> Prints:
    """The fingerprints of four ranks that hold the tensors."""
    fingerprints = []
    for rank in range(4):
        tp = rank % 2
        pp = rank // 2
        parts = []
        for name, (shape, cut, stages) in MODEL.items():
            if pp not in stages:
                continue
            box = [(0, n) for n in shape]
            if cut is not None:
                half = shape[cut] // 2
                box[cut] = (half * tp, half * (tp + 1))
            inside = tuple(slice(*ends) for ends in box)
            own = {kind: mark(tensors[name, kind][inside], tuple(box)) for kind in KINDS}
            decay = 0.0 if "layernorm" in name else 0.1
            part = Part(name=name, shape=shape, box=tuple(box), decay=decay, marks=own)
            parts.append(part.to_json())
        place = {"rank": rank, "tp": tp, "pp": pp, "generators": {"cpu": f"{rank}ab"}}
        values = {**FACTS, **place, "parts": parts, **facts}
        fingerprints.append(json.loads(json.dumps(values)))
    return fingerprints


def put(folder: Path, fingerprints: Prints) -> Path:
    folder.mkdir(parents=True)
    for values in fingerprints:
        (folder / file_of(values["rank"])).write_text(json.dumps(values))
    return folder


def saved(run: Path, fingerprints: Prints) -> Path:
    """A run folder with a checkpoint, of fingerprints alone."""
    folder = put(run / "checkpoints/iter_0000010", fingerprints)
    content = {
        "identity": {"shape": SHAPE},
        "iteration": 10,
        "consumed_samples": 80,
        "files": {},
        "layout": LAYOUT,
        "scalars": {"step": 10.0},
        "tensors": {},
    }
    checkpoints.write_manifest(folder, content)
    return run


def loaded(run: Path, fingerprints: Prints) -> Path:
    put(run / "fingerprints/load_0000010", fingerprints)
    return run


@pytest.fixture
def before(tmp_path) -> Path:
    return saved(tmp_path / "before", prints())


def remade(
    name: str, rank: int | None, change: Callable[[np.ndarray], np.ndarray], *kinds: str
) -> Prints:
    """Fingerprints in which that tensor is another, on one rank or on all."""
    tensors = dict(STATE)
    for kind in kinds:
        tensors[name, kind] = change(tensors[name, kind]).astype(np.float32)
    others = prints(tensors)
    if rank is None:
        return others
    return [*prints()[:rank], others[rank], *prints()[rank + 1 :]]


def edited(rank: int, **values: Any) -> Prints:
    fingerprints = prints()
    fingerprints[rank] |= values
    return fingerprints


def decaying() -> Prints:
    fingerprints = prints()
    next(part for part in fingerprints[0]["parts"] if part["name"] == NORM)["decay"] = 0.1
    return fingerprints


def copied(size: float) -> Prints:
    """The model computes with weights that are that far from the optimizer's."""
    fingerprints = prints()
    others = prints({key: x * np.float32(1 + size) for key, x in STATE.items()})
    for fingerprint, other in zip(fingerprints, others, strict=True):
        for part, moved in zip(fingerprint["parts"], other["parts"], strict=True):
            part["marks"][COPY] = moved["marks"]["weight"]
    return fingerprints


LOST = {  # what was loaded; a finding among others, or none
    "nothing": (prints(), None),
    "a norm reset": (remade(FINAL, None, np.ones_like, "weight"), ("reset", FINAL, [2, 3])),
    "a norm apart across TP": (
        remade(NORM, 1, lambda x: x + 1e-3, "weight"),
        ("tensor-replicas", NORM, [1]),
    ),
    "tied copies apart": (
        remade(WORD, 2, lambda x: x[::-1, ::-1], "weight", "exp_avg"),
        ("tied", WORD, [2]),
    ),
    "a norm that decays": (decaying(), ("decay", NORM, [0])),
    "a model that computes with other weights": (copied(0.05), ("copy", NORM, [0, 1])),
    "a generator": (edited(3, generators={"cpu": "other"}), ("generators", "", [3])),
    "the next samples": (edited(1, samples="0001"), ("data", "", [1])),
    "Adam's step": (prints(scalars={"step": 0.0}), ("optimizer", "", [])),
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_restart_lost_is_named_with_its_tensor_and_ranks(name: str, before: Path, tmp_path):
    fingerprints, expected = LOST[name]
    findings = compare_restart(before, loaded(tmp_path / "after", fingerprints)).findings
    found = [(f.kind, f.tensor, [holder.rank for holder in f.ranks]) for f in findings]
    assert expected in found if expected else not found


@pytest.mark.parametrize(("tensor", "found"), [(NORM, 0), (MATRIX, 1)])
def test_between_two_runs_matrices_count_and_norms_do_not(
    tensor: str, found: int, before: Path, tmp_path
):
    """Adam scales a gradient that is 0 but for rounding to a whole step: small tensors differ
    between equal runs.
    """
    other = saved(tmp_path / "other", remade(tensor, None, lambda x: x * 1.1, "weight"))
    assert len(compare_restart(before, other).findings) == found


def test_ranks_without_a_fingerprint_are_noted_and_their_tensors_not_compared(
    before: Path, tmp_path
):
    comparison = compare_restart(before, loaded(tmp_path / "partial", prints()[:3]))
    assert not comparison.findings and "no fingerprint of ranks 3" in comparison.notes[0]


def test_the_command_prints_it_in_lines_and_as_json(before: Path, tmp_path, capsys):
    whole = loaded(tmp_path / "after", prints())
    broken = put(tmp_path / "broken", LOST["a norm reset"][0])
    assert main(f"debug restart {before} {whole}".split()) == 0
    assert "nothing is wrong" in capsys.readouterr().out
    assert main(f"debug restart {before} {broken} --json".split()) == 1
    (finding,) = json.loads(capsys.readouterr().out)["findings"]
    assert finding["ranks"][0] == {"rank": 2, "tp": 0, "pp": 1, "dp": 0}


def half(folder: Path) -> None:
    path = put(folder, prints()) / file_of(2)
    path.write_text(path.read_text()[:-200])


def marked(folder: Path) -> None:
    fingerprints = prints()
    fingerprints[0]["parts"][0]["marks"] = {"weight": "x"}
    put(folder, fingerprints)


def other_model(folder: Path) -> None:
    put(folder, prints(shape={**SHAPE, "hidden_size": 12}))


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "another model": (other_model, "B hidden_size=12: before/iter_0000010 has 6: two models"),
    "a world of 10^12": (lambda folder: put(folder, edited(0, world=10**12)), "fingerprint="),
    "marks of text": (marked, "fingerprint={B}/fingerprint_00000.json: "),
    "half-written": (half, "fingerprint={B}/fingerprint_00002.json: is damaged or half-written"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_compared_is_one_line_and_exit_code_2(
    name: str, before: Path, tmp_path, capsys
):
    make, line = BAD[name]
    make(tmp_path / "B")
    assert main(f"debug restart {before} {tmp_path}/B".split()) == 2
    error = capsys.readouterr().err
    assert error.startswith("trilane: " + line.format(B=tmp_path / "B")) and error.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", BUGS)
def test_a_bug_planted_into_a_real_engine_is_named(kind: str, pool: WorkerPool, tmp_path):
    bug = BUGS[kind]
    comparison = cycle(pool, tmp_path / "r", bug.topology, kind)
    assert named(bug, comparison), comparison.summary()


@pytest.mark.slow
def test_nothing_is_found_in_a_clean_cycle_with_dropout(pool: WorkerPool, tmp_path):
    assert not cycle(pool, tmp_path / "r", CLEAN).findings
