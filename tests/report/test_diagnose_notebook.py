"""The notebook of a hang shows the same as the command, for a study that hung and for one that did
not.
"""

from pathlib import Path
from random import Random

import pytest
from plants import PLANTS, write

from trilane.report import notebook
from trilane.workspace.study import Study
from trilane_diagnose.hang import study_hang
from trilane_diagnose.plots import hang_grid
from trilane_diagnose.restart import study_restart

CULPRITS = (67, 70)  # of the example
WORD, NORM = "embedding.word_embeddings.weight", "embedding.layernorm.weight"


@pytest.mark.slow
def test_the_notebook_runs_where_nothing_hangs_and_names_the_suspects_of_a_folder_of_dumps(
    outputs: Path, tmp_path: Path
) -> None:
    calm = Study.create("calm")
    notebook.run("05_diagnose", calm)
    assert {p.name for p in calm.folder.rglob("*")} == {
        "05_diagnose.ipynb",
        "05_diagnose.html",
        "index.html",
    }
    page = (calm.folder / "05_diagnose.html").read_text()
    assert "Nothing hangs in this study" in page and "No run of this study was restarted" in page
    assert WORD in page and "example-node09" in page and "jean-zay" not in page
    scene = PLANTS["a rank in the data loader"](Random(3))
    write(tmp_path / "dumps", scene)
    notebook.run("05_diagnose", Study.create("hung"), dumps=str(tmp_path / "dumps"))
    page = (outputs / "hung" / "05_diagnose.html").read_text()
    assert (
        scene.guilty
        and all(f"rank {rank}" in page for rank in scene.guilty)
        and "Nothing hangs" not in page
    )


def test_the_examples_show_what_document_003_reports_and_the_grid_frames_the_suspects(
    outputs: Path,
) -> None:
    study = Study.create("calm")
    hang, restart = study_hang(study), study_restart(study)
    assert hang.suspects == CULPRITS
    assert {(f.kind, f.tensor) for f in restart.findings} >= {
        ("reset", NORM),
        ("decay", NORM),
        ("tied", WORD),
    }
    figure = hang_grid(hang)
    frames = [p for p in figure.axes[0].patches if p.get_linewidth() > 2]
    assert len(frames) == len(CULPRITS) and len(figure.axes[0].patches) == 320
