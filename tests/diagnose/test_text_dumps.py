"""Weights written as text around a restart, as in document 003: what differs is named, as far as text shows it."""

from pathlib import Path

import pytest
from support import REPOSITORY

from trilane.cli.app import main
from trilane.diagnose.restart.compare import compare_restart

SEEDS = REPOSITORY.parent / "shared/seeds"
WORD, NORM = "module.tied_modules.embed.word_embeddings.weight", "module.9.input_layernorm.weight"
DENSE = "module.9.mlp.dense_h_to_4h.weight"
ROWS = {WORD: (0.0123, -0.0046, 0.0031), NORM: (0.9961, 1.0039, 0.9922), DENSE: (-0.0007, 0.02, 0.0005)}


def dump(folder: Path, number: int, moment: str, rank: int, process: int, **changes: tuple[float, ...]) -> None:
    """A file of torch's form, with the ellipses of a large tensor; rank 4 pp + 2 dp + tp."""
    folder.mkdir(exist_ok=True)
    pp, dp, tp = rank // 4, rank // 2 % 2, rank % 2
    text = ""
    for name, row in (ROWS | {n.replace("__", "."): v for n, v in changes.items()}).items():
        shown = ", ".join(f"{v:.4f}" if name != DENSE else f"{v:.4e}" for v in row)
        body = (
            f"[{shown}, ..., {shown}]"
            if name == NORM
            else f"[[{shown},  ..., {shown}],\n        ...,\n        [{shown}]]"
        )
        end = "device='cuda:1',\n       dtype=torch.bfloat16, requires_grad=True)"
        text += f"{name}=Parameter containing:\ntensor({body}, {end}\n"
    name = f"debug-{number}-pp{pp}-tp{tp}-dp{dp}-global{rank}-{moment}-iteration-{process}.txt"
    (folder / name).write_text(text)


def both(folder: Path, odd: int = -1, **changes: tuple[float, ...]) -> tuple[Path, Path]:
    """Dumps of eight ranks before and after a restart at iteration 5; `changes` after it, on one rank or all."""
    a, b = folder / "a", folder / "b"
    for rank in range(8):
        for number in (4, 5):
            dump(a, number, "after", rank, 100 + rank)
        dump(b, 6, "before", rank, 200 + rank, **(changes if odd in (-1, rank) else {}))
        dump(b, 6, "after", rank, 200 + rank, **{WORD: (9.0, 9.0, 9.0)})
    return a, b


CHANGED = {
    "nothing": ({}, -1, set()),
    "a norm reset": ({NORM: (1.0, 1.0, 1.0)}, -1, {("reset", NORM, 8)}),
    "a matrix": ({DENSE: (-0.0007, 0.02, 0.0009)}, -1, {("not-restored", DENSE, 8)}),
    "below the last place": ({WORD: (0.01232, -0.0046, 0.0031)}, -1, set()),
    "one replica": ({DENSE: (-0.0007, 0.03, 0.0005)}, 2, {("not-restored", DENSE, 1), ("data-replicas", DENSE, 1)}),
    "a tied end": ({WORD: (0.5, -0.0046, 0.0031)}, 4, {("not-restored", WORD, 1), ("tied", WORD, 1)}),
    "another run": ({WORD: (0.3, 0.2, 0.1), DENSE: (0.3, 0.2, 0.1)}, -1, {("run", "", 0)}),
}


@pytest.mark.parametrize(("changes", "rank", "expected"), CHANGED.values(), ids=CHANGED.keys())
def test_what_the_text_shows_to_differ_is_named(
    changes: dict[str, tuple[float, ...]], rank: int, expected: set[tuple[str, str, int]], tmp_path: Path
) -> None:
    found = compare_restart(*both(tmp_path, rank, **changes))
    known = {(f.kind, f.tensor, len(f.ranks)) for f in found.findings}
    assert expected <= known and {(kind, tensor) for kind, tensor, _ in known} <= {
        *((kind, tensor) for kind, tensor, _ in expected),
        ("data-replicas", WORD if rank == 4 else DENSE),
    }
    assert "after iteration 5" in found.compared[0] and "Adam's moments" in found.notes[1]


def test_the_diff_of_document_003_shows_a_norm_reset_and_an_embedding_that_differs() -> None:
    if not SEEDS.exists():
        pytest.skip("the source documents are not on this machine")
    (document,) = SEEDS.glob("003_*.txt")
    found = compare_restart(document, document)
    assert {(f.kind, f.tensor.rsplit("embeddings.")[-1], f.ranks[0].rank) for f in found.findings} == {
        ("reset", "norm.weight", 369),
        ("not-restored", "weight", 369),
    }


BAD = {
    "nothing": lambda folder: None,
    "no tensor": lambda folder: (
        folder.mkdir(),
        (folder / "debug-1-pp0-tp0-dp0-global0-after-iteration-7.txt").touch(),
    ),
    "another file": lambda folder: folder.write_text("loss: 3"),
}


@pytest.mark.parametrize("make", BAD.values(), ids=BAD.keys())
def test_text_is_compared_with_text_alone(make, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:  # type: ignore[no-untyped-def]
    make(tmp_path / "c")
    a, _ = both(tmp_path)
    assert main(["debug", "restart", str(a), str(tmp_path / "c")]) == 2
    line = f"trilane: B={tmp_path / 'c'}: holds no weights as text, with which alone text is compared\n"
    assert capsys.readouterr().err == line
    assert main(["debug", "restart", str(a), str(a)]) == 0
