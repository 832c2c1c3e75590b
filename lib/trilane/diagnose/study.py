"""The hang and the restart of a study; where it has none, the examples in data/examples, made up from document 003.

An example is shown and saved nowhere: its dumps and states are in a temporary folder while it is read.
"""

import json
import tempfile
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

from trilane.diagnose.hang.verdict import Verdict, diagnose_hang
from trilane.diagnose.restart.compare import RestartComparison, compare_restart
from trilane.utils.tables import Text
from trilane.workspace.fingerprints import file_of
from trilane.workspace.study import Study


def study_hang(study: Study, dumps: str = "") -> Verdict:
    """The verdict on the folder `dumps`, else on the study's last run that hung, else on the example.

    Raises ValueError where `dumps` holds no dump.
    """
    hung = [folder for folder in study.run_folders() if list((folder / "stacks").glob("*/rank_*"))]
    if dumps or hung:
        return diagnose_hang(Path(dumps) if dumps else hung[-1])
    with tempfile.TemporaryDirectory() as folder:
        return replace(diagnose_hang(write_hang_example(Path(folder, "example"))), example=True)


def study_restart(study: Study, before: str = "", after: str = "") -> RestartComparison:
    """The comparison of `before` with `after` (by default the same folder), else of the study's last restart, else of
    the example. Raises ValueError where one of them holds no state."""
    if before:
        return compare_restart(Path(before), Path(after or before))
    restarted = [folder for folder in study.run_folders() if list(folder.glob("fingerprints/load_*"))]
    if restarted:
        return compare_restart(restarted[-1], restarted[-1])
    with tempfile.TemporaryDirectory() as folder:
        return replace(compare_restart(*write_restart_example(Path(folder))), example=True)


def save_diagnosis(study: Study, hang: Verdict, restart: RestartComparison) -> Text:
    """Write hang.json and restart.json of what the study's own runs (or given folders) show; their paths, a line each.

    Of an example nothing is written.
    """
    found: dict[str, Verdict | RestartComparison] = {"hang.json": hang, "restart.json": restart}
    saved = [study.save(name, each.record(), "05_diagnose") for name, each in found.items() if not each.example]
    return Text.joined("\n\n", [*saved, *(["Examples are not saved."] if len(saved) < len(found) else [])])


def write_hang_example(folder: Path) -> Path:
    """Write the example's 320 dumps and topology.json into a new folder; its path."""
    example = _example("hang")
    stacks = {rank: stack["frames"] for stack in example["stacks"].values() for rank in stack.get("ranks", ())}
    sizes = example["topology"]
    folder.mkdir(parents=True)
    for rank in range(sizes["tp"] * sizes["pp"] * sizes["dp"]):
        pid, frames = 800000 + rank, stacks.get(rank, example["stacks"]["done"]["frames"])
        lines = [f"Process {pid}: python -u pretrain_gpt.py", "Python v3.8.12 (python3.8)", ""]
        lines += [f'Thread {pid} (active): "MainThread"', *(f"    {frame}" for frame in frames)]
        (folder / f"rank_{rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "topology.json").write_text(json.dumps(sizes) + "\n", encoding="utf-8")
    return folder


def write_restart_example(folder: Path) -> tuple[Path, Path]:
    """Write the example's fingerprints before the save and after the load into new folders; their paths."""
    places = folder / "save_805", folder / "load_805"
    for place, name in zip(places, ("before", "after"), strict=True):
        place.mkdir(parents=True)
        for values in _example("restart")[name]:
            (place / file_of(values["rank"])).write_text(json.dumps(values) + "\n", encoding="utf-8")
    return places


def _example(name: str) -> dict[str, Any]:
    return json.loads(resources.files("trilane").joinpath(f"data/examples/{name}.json").read_text(encoding="utf-8"))
