"""The hang and the restart of a study; where it has none, the examples in data/examples, which are saved nowhere."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import trilane
from trilane.diagnose.hang import Verdict, diagnose_hang
from trilane.diagnose.restart import RestartComparison, compare_restart
from trilane.utils.tables import Text
from trilane.utils.validation import shipped_json
from trilane.workspace.study import Study


def study_hang(study: Study, dumps: str = "") -> Verdict:
    """The verdict on the folder `dumps`, else on the study's last run that hung, else on the example.

    Raises ValueError where `dumps` holds no dump: `study_hang(Study.open("demo"), "stacks")`.
    """
    hung = [folder for folder in study.run_folders() if list((folder / "stacks").glob("*/rank_*"))]
    if dumps or hung:
        return diagnose_hang(Path(dumps) if dumps else hung[-1])
    example = shipped_json("examples/hang")
    stacks = {rank: stack["frames"] for stack in example["stacks"].values() for rank in stack.get("ranks", ())}
    sizes = example["topology"]
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(sizes["tp"] * sizes["pp"] * sizes["dp"]):
            frames = stacks.get(rank, example["stacks"]["done"]["frames"])
            lines = [f'Thread {rank} (active): "MainThread"', *(f"    {frame}" for frame in frames)]
            Path(folder, f"rank_{rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        Path(folder, "topology.json").write_text(json.dumps(sizes) + "\n", encoding="utf-8")
        return replace(diagnose_hang(Path(folder)), example=True)


def study_restart(study: Study, before: str = "", after: str = "") -> RestartComparison:
    """The comparison of `before` with `after` (by default the same folder), else of the study's last restart, else of
    the example. Raises ValueError where one of them holds no state: `study_restart(study, "first", "second")`."""
    restarted = [folder for folder in study.run_folders() if list(folder.glob("fingerprints/load_*"))]
    if before or restarted:
        first = Path(before) if before else restarted[-1]
        return compare_restart(first, Path(after) if before and after else first)
    example = Path(trilane.__path__[0], "data/examples/restart")
    return replace(compare_restart(example / "save_805", example / "load_805"), example=True)


def save_diagnosis(study: Study, hang: Verdict, restart: RestartComparison) -> Text:
    """Write hang.json and restart.json of what the study's own runs (or given folders) show; their paths, a line each.

    Of an example nothing is written: `save_diagnosis(study, study_hang(study), study_restart(study))`.
    """
    found = {"hang.json": {"folder": str(hang.folder), **hang.to_json()}} if not hang.example else {}
    found |= {"restart.json": restart.to_json()} if not restart.example else {}
    saved = [study.save(name, values, "05_diagnose") for name, values in found.items()]
    return Text.joined("\n\n", [*saved, *(["Examples are not saved."] if len(saved) < 2 else [])])
