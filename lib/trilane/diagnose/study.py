"""The hang and the restart of a study; where it has none, the examples in data/examples, made up from the BLOOM
chronicles: shown and saved nowhere."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

from trilane.diagnose.hang import Verdict, diagnose_hang
from trilane.diagnose.restart import RestartComparison, compare_restart
from trilane.utils.tables import Text
from trilane.utils.validation import shipped_json
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
    restarted = [folder for folder in study.run_folders() if list(folder.glob("fingerprints/load_*"))]
    if before or restarted:
        first = Path(before) if before else restarted[-1]
        return compare_restart(first, Path(after) if before and after else first)
    with tempfile.TemporaryDirectory() as folder:
        return replace(compare_restart(*write_restart_example(Path(folder))), example=True)


def save_diagnosis(study: Study, hang: Verdict, restart: RestartComparison) -> Text:
    """Write hang.json and restart.json of what the study's own runs (or given folders) show; their paths, a line each.

    Of an example nothing is written.
    """
    where = {"before": str(restart.before), "after": str(restart.after)}
    found = {"hang.json": {"folder": str(hang.folder), **hang.to_json()}} if not hang.example else {}
    found |= {"restart.json": {**where, **restart.to_json()}} if not restart.example else {}
    saved = [study.save(name, values, "05_diagnose") for name, values in found.items()]
    return Text.joined("\n\n", [*saved, *(["Examples are not saved."] if len(saved) < 2 else [])])


def write_hang_example(folder: Path) -> Path:
    """Write the example's 320 dumps and topology.json into a new folder; its path."""
    example = shipped_json("examples/hang")
    stacks = {rank: stack["frames"] for stack in example["stacks"].values() for rank in stack.get("ranks", ())}
    sizes = example["topology"]
    folder.mkdir(parents=True)
    for rank in range(sizes["tp"] * sizes["pp"] * sizes["dp"]):
        frames = stacks.get(rank, example["stacks"]["done"]["frames"])
        lines = [f'Thread {800000 + rank} (active): "MainThread"', *(f"    {frame}" for frame in frames)]
        (folder / f"rank_{rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "topology.json").write_text(json.dumps(sizes) + "\n", encoding="utf-8")
    return folder


def write_restart_example(folder: Path) -> tuple[Path, Path]:
    """Write the example's fingerprints before the save and after the load into new folders; their paths."""
    places = folder / "save_805", folder / "load_805"
    for place, name in zip(places, ("before", "after"), strict=True):
        place.mkdir(parents=True)
        for values in shipped_json("examples/restart")[name]:
            (place / file_of(values["rank"])).write_text(json.dumps(values) + "\n", encoding="utf-8")
    return places
