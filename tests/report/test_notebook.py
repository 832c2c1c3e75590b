"""The checked way to the notebooks: parameters, failures that name the cell, resume, reports."""

from pathlib import Path

import nbformat
import pytest

from trilane.report import notebook
from trilane.report.notebook import copy_into
from trilane.utils.folder_lock import FolderLock
from trilane.workspace.study import Study

PARAMETERS = """\
study: str = "demo"  # folder
tp: int = 2  # size
rate: float = 1.0  # speed
where: str = ""  # a path
on: bool = True  # flag"""
STORY = [
    ("markdown", "# Does it add up?\n\nA test.", []),
    ("code", PARAMETERS, ["parameters"]),
    ("markdown", "## The sum", []),
    (
        "code",
        "from trilane.config.parallelism import Topology\nprint('tp is', Topology(tp=tp, gbs=tp).tp, rate, on)\n"
        "import os\nprint('here:', os.path.exists(where))",
        [],
    ),
    ("code", "assert tp != 13, 'unlucky'", []),
    ("code", "import os\nif tp == 14: os._exit(1)", []),
]


@pytest.fixture
def story(tmp_path, monkeypatch) -> str:
    """A little notebook of its own, in a folder of its own."""
    kernel = {"name": "python3", "language": "python", "display_name": "Python 3"}
    made = nbformat.v4.new_notebook(metadata={"kernelspec": kernel})
    for kind, source, tags in STORY:
        cell = getattr(nbformat.v4, f"new_{kind}_cell")(source)
        cell.metadata["tags"] = tags
        made.cells.append(cell)
    folder = tmp_path / "notebooks"
    folder.mkdir()
    nbformat.write(made, folder / "07_story.ipynb")
    monkeypatch.setenv("TRILANE_HOME", str(tmp_path))
    return "07_story"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tpp": "2"}, "parameter=tpp: known: on, rate, study, tp, where; did you mean tp?"),
        ({"tp": "two"}, "tp=two: must be of type int"),
        ({"tp": "__import__('os')"}, "tp=__import__('os'): must be of type int"),
        ({"rate": "fast"}, "rate=fast: must be of type float"),
    ],
)
def test_a_misspelt_or_ill_typed_parameter_is_refused_before_anything_runs(
    story, outputs, given, message
):
    with pytest.raises(ValueError) as caught:
        notebook.distribute([story], given)
    assert str(caught.value) == message
    assert [path.name for path in outputs.iterdir()] == ["local.json"]


@pytest.mark.parametrize(
    ("tp", "is_input", "reason"),
    [
        ("0", True, "cell [3]: tp=0: must be a whole number of at least 1"),
        ("13", False, "cell [4]: unlucky"),
        ("14", False, ""),
    ],
)
def test_a_notebook_that_fails_leaves_its_traceback_names_the_cell_and_is_not_done(
    story, outputs, tp, is_input, reason
):
    study = Study.create("s")
    with pytest.raises(notebook.NotebookError) as caught:
        notebook.run(story, study, tp=tp)
    message = f"07_story, {reason}" if reason else "07_story: Kernel died"
    assert str(caught.value) == message and caught.value.is_input is is_input
    assert ("Traceback" in (study.folder / "07_story.ipynb").read_text()) is bool(reason)
    assert "failed" in (study.folder / "index.html").read_text()
    assert not notebook.is_done(story, study, {"tp": int(tp)})


def test_a_copy_for_the_lab_has_the_studys_parameters_and_is_never_overwritten(story, outputs):
    study = Study.create("s")
    notebook.run(story, study, tp="8", where="a'b")
    path = copy_into(study, story, {"rate": 0.5})
    sources = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    given = {"tp": 8, "where": "a'b", "study": "s", "rate": 0.5}
    namespace = dict[str, object]()
    exec(sources[2], namespace)
    assert given.items() <= namespace.items()
    path.write_text(path.read_text().replace("speed", "my own words"))
    assert copy_into(study, story, {"tp": 1}) == path and "my own words" in path.read_text()


def test_a_resumed_study_runs_again_only_what_is_not_done(story, outputs, capfd):
    study = Study.create("s")
    notebook.run_all(study, {story: {"tp": 4}})
    before = (study.folder / "07_story.ipynb").stat().st_mtime_ns
    notebook.run_all(study, {story: {"tp": 4}})
    assert "completed before, kept" in capfd.readouterr().err
    assert (study.folder / "07_story.ipynb").stat().st_mtime_ns == before
    notebook.run_all(study, {story: {"tp": 8}})
    assert (study.folder / "07_story.ipynb").stat().st_mtime_ns > before
    assert "tp is 4" in (study.folder / "earlier/07_story.ipynb.1").read_text(), (
        "the earlier copy is kept"
    )


def test_a_notebook_that_another_process_executes_in_the_study_is_refused(
    story: str, outputs: Path
):
    study = Study.create("s")
    message = rf"^notebook={story}, study=\S+/s: is locked by process \d+ on "
    with (
        FolderLock([study.folder], f".{story}.lock").held(0.0),
        pytest.raises(ValueError, match=message),
    ):
        notebook.run(story, study)
    assert not list(study.folder.iterdir())


def test_all_of_another_cluster_trains_nothing_and_decides():
    given = {"cluster": "jz-a100-80g", "shape": "70,14336,112,2048,250880"}
    with pytest.raises(ValueError, match="gpus=missing: needed on"):
        notebook.notebooks_of_all(given)
    given |= {"gpus": "384", "gbs": "2048"}
    names, values = notebook.notebooks_of_all(given)
    assert names == ["02_topology", "03_launch", "07_calendar", "08_decision"]
    assert notebook.distribute(names, values)["03_launch"] == {"train": False}
    assert notebook.notebooks_of_all({"gpus": "4"})[0][-1] == "04_analyze"
    with pytest.raises(ValueError, match="cluster=nowhere: known"):
        notebook.notebooks_of_all({"cluster": "nowhere"})
