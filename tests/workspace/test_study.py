"""Studies: never overwritten, always stamped, and a run folder is used once."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from support import small_plan

from trilane.workspace import run as run_module
from trilane.workspace.run import write_text
from trilane.workspace.status import RunStatus, Status, write_status
from trilane.workspace.study import Study


@pytest.mark.parametrize("name", ["", "../x", "x" * 90, "$(id)"])
def test_a_study_name_is_a_plain_folder_name(outputs, name):
    with pytest.raises(ValueError, match="must be a plain folder name"):
        Study(name)


def test_a_result_is_stamped_and_its_earlier_version_is_kept(outputs):
    study = Study.create("s")
    study.save("a.json", {"value": 1}, "01")
    first = (study.folder / "a.json").read_text()
    study.save("a.json", {"value": 1}, "01")
    assert (study.folder / "a.json").read_text() == first
    study.save("a.json", {"value": 2}, "01")
    assert study.load("a.json", "01")["value"] == 2
    assert study.values("a.json", "01") == {"value": 2}
    assert (study.folder / "earlier/a.json.1").read_text() == first
    assert set(study.load("a.json", "01")["made_by"]) >= {
        "notebook",
        "revision",
        "trilane",
        "host",
        "time",
    }


def test_a_run_folder_is_never_used_twice_but_a_completed_equal_run_is_found_again(outputs):
    study, plan = Study.create("s"), small_plan()
    files = {"plan.json": json.dumps(plan.to_json())}
    first, done = study.run_folder(plan, files)
    assert (first.name, done) == ("small", False)
    assert study.run_folder(plan, files) == (first, False), "nothing was started there yet"
    write_text(first / "run.log", "half a run")
    second, done = study.run_folder(plan, files)
    assert (second.name, done) == ("small-2", False)
    write_status(
        first, RunStatus(status=Status.COMPLETED, evidence="", rank=None, exit_code=0, seconds=1.0)
    )
    assert study.run_folder(plan, files) == (first, True)
    longer = small_plan(train_iters=9)
    assert study.run_folder(longer, files)[0].name == "small-3"


def test_nothing_is_lost_where_two_save_at_once(outputs, monkeypatch):
    """Each of them finds the version of another, also one that was written since it looked."""
    here = Study.create("s")
    keep = run_module.set_aside
    monkeypatch.setattr(run_module, "set_aside", lambda path: (keep(path), time.sleep(0.02)))
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(lambda n: Study("s").save("plans.json", {"plan": n}, "02_topology"), range(4))
        )
    paths = [here.folder / "plans.json", *(here.folder / "earlier").iterdir()]
    assert sorted(json.loads(path.read_text())["plan"] for path in paths) == [0, 1, 2, 3]
    assert sorted(path.name for path in here.folder.iterdir()) == ["earlier", "plans.json"]
