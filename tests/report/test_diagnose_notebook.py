"""The notebook of a hang shows the same as the command, for a study that hung and for one that did
not.
"""

from pathlib import Path
from random import Random

import pytest
from plants import PLANTS, write

from trilane.report import notebook
from trilane.workspace.study import Study

WORD = "embedding.word_embeddings.weight"


@pytest.mark.slow
def test_the_notebook_runs_where_nothing_hangs_and_names_the_suspects_of_a_folder_of_dumps(
    outputs: Path, tmp_path
):
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
    notebook.run("05_diagnose", Study.create("hung"), dumps=f"{tmp_path}/dumps")
    page = (outputs / "hung" / "05_diagnose.html").read_text()
    assert (
        scene.guilty
        and all(f"rank {rank}" in page for rank in scene.guilty)
        and "Nothing hangs" not in page
    )
