"""The notebook of a hang shows the same as the command, for a study that hung and for one that did not."""

import json
import warnings
from pathlib import Path
from random import Random

import pytest
from dumps import topology, write_all
from plants import PLANTS, write

from trilane.diagnose.hang import diagnose_hang
from trilane.diagnose.study import study_hang, study_restart
from trilane.report import notebook
from trilane.report.plots.runs import hang_grid
from trilane.workspace.study import Study

CULPRITS = (67, 70)  # of the example
WORD, NORM = "embedding.word_embeddings.weight", "embedding.layernorm.weight"


@pytest.mark.slow
def test_the_notebook_runs_where_nothing_hangs_and_names_the_suspects_of_a_folder_of_dumps(
    outputs: Path, tmp_path: Path
) -> None:
    calm = Study.create("calm")
    notebook.run("05_diagnose", calm)
    assert {p.name for p in calm.folder.rglob("*")} == {"05_diagnose.ipynb", "05_diagnose.html", "index.html"}
    page = (calm.folder / "05_diagnose.html").read_text()
    assert "Nothing hangs in this study" in page and "No run of this study was restarted" in page
    assert WORD in page and "example-node09" in page and "jean-zay" not in page
    scene = PLANTS["a rank in the data loader"](Random(3))
    write(tmp_path / "dumps", scene)
    notebook.run("05_diagnose", Study.create("hung"), dumps=str(tmp_path / "dumps"))
    assert json.loads((outputs / "hung" / "hang.json").read_text())["suspects"] == sorted(scene.guilty)


def test_the_examples_show_what_document_003_reports_and_the_grid_frames_the_suspects(outputs: Path) -> None:
    study = Study.create("calm")
    hang, restart = study_hang(study), study_restart(study)
    assert hang.suspects == CULPRITS
    assert {(f.kind, f.tensor) for f in restart.findings} >= {("reset", NORM), ("decay", NORM), ("tied", WORD)}
    figure = hang_grid(hang)
    frames = [p for p in figure.axes[0].patches if p.get_linewidth() > 2]
    assert len(frames) == len(CULPRITS) and len(figure.axes[0].patches) == 320


def test_a_small_grid_keeps_its_room_and_its_legend_where_names_are_long(tmp_path: Path) -> None:
    stack = (("$\\frac$ wait" * 20, "threading.py", 1),)  # not a formula that matplotlib would refuse to draw
    write_all(tmp_path, {rank: stack if rank else (("<module>", "W" * 90, 1),) for rank in range(4)}, "text")
    topology(tmp_path, 2, 1, 2)
    figure = hang_grid(diagnose_hang(tmp_path))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as constrained_layout not applied
        figure.savefig(tmp_path / "grid.png", bbox_inches="tight")
    saved = figure.get_tightbbox()
    names = figure.legends[0].get_window_extent().transformed(figure.dpi_scale_trans.inverted())
    assert figure.axes[0].get_position().width > 0.7
    assert saved.x0 <= names.x0 and names.x1 <= saved.x1 and saved.y0 <= names.y0, "the legend is in the picture"
