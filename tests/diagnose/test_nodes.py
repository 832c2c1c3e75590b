"""Which nodes of a job train, by what the test of each finds; which ones later jobs avoid."""

import math
import os
import socket

import pytest
import torch

from trilane.workspace import ledger
from trilane_diagnose import node_test, nodes
from trilane_diagnose.node_test import Findings, Result
from trilane_engine.bench import node_test as gpu_health
from trilane_engine.bench import rates
from trilane_engine.world import World


def judged(names: str, speeds: dict[str, float]) -> Findings:
    """Nodes with their speed: 1 as the others, 0 broken."""
    results = {}
    for name in names:
        speed = speeds.get(name, 1.0)
        measured = {"matmul FLOP/s": 100.0 * speed, "PCIe B/s": 10.0 * speed}
        results[name] = Result(rates=measured)
        if not speed:
            results[name] = Result(broken="no GPU")
    return node_test.findings(results, is_cpu=False)


@pytest.mark.parametrize(
    ("names", "speeds", "broken", "slow"),
    [
        ("ab", {"b": 0.74}, "", "b"),
        ("abc", {"a": 0.4, "b": 0.4, "c": 0.4}, "", ""),  # all slow: nothing to compare with
        ("abcd", {"a": 0.0}, "a", ""),
        ("ab", {"a": 0.0, "b": 0.0}, "", ""),  # the test's own fault
        ("abcdef", {"b": 0.5, "c": 0.4}, "", "bc"),
    ],
)
def test_what_is_slow_or_broken_is_found_by_the_other_nodes(
    names: str, speeds: dict[str, float], broken: str, slow: str
):
    found = judged(names, speeds)
    assert ("".join(found.broken), "".join(found.slow)) == (broken, slow)


def test_the_slowest_nodes_are_left_out_first():
    found = judged("abcd", {"a": 0.5, "b": 0.7})
    for count, wanted in ((2, "cd"), (3, "bcd"), (4, "abcd")):
        chosen, left_out = nodes.choose("abcd", count, found.broken, found.slow)
        assert "".join(chosen) == wanted, "in the order of the job"
        assert set(left_out) == set("abcd") - set(wanted)
    rule = r"^nodes=a,c: the plan needs 3 nodes, and 2 of the job's 3 are left: b: no GPU$"
    with pytest.raises(ValueError, match=rule):
        nodes.choose("abc", 3, {"b": "no GPU"}, {})


CARDS = {
    "gpu index,memory.used": [["0", "4"], ["1", "5"]],
    "remapped-rows gpu_bus_id,remapped_rows.failure": [["A", "0"], ["B", "No"]],
}
IN_USE = "GPU 1: 29.3 GiB in use before the training"


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, []),
        ({"memory.used": [["0", "4"], ["1", "30000"]]}, [IN_USE]),
        ({"remapped": [["A", "1"]]}, ["GPU A: its memory has no rows left to remap"]),
    ],
)
def test_the_health_of_gpus_is_what_nvidia_smi_reports(change: dict, broken: list[str]):
    def ask(what: str, names: str) -> list[list[str]]:
        key = f"{what} {names}"
        return next((rows for word, rows in change.items() if word in key), CARDS[key])

    assert gpu_health.faults(2, ask) == broken


def test_a_node_that_answers_but_computes_wrong_is_broken(monkeypatch):
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    assert rates.wrong(alone) == []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b: mm(a, b) * math.nan)
    assert rates.wrong(alone) == ["a matmul in fp32 gives wrong results"]


RATES = '{"broken": [], "rates": {"matmul FLOP/s": %s}}'
# a task for each node of the list
SRUN = """while [[ $1 == --* ]]; do
  [[ $1 != --nodelist=* ]] || names=${1#*=}
  shift
done
echo "$names" >>%s/steps
[[ $names != *n9* ]] || { echo "srun: error: Task launch for S failed on node n9: X" >&2; exit 1; }
for n in ${names//,/ }; do SLURMD_NODENAME=$n "$@" & done
wait"""
TEST = f"""kill -USR1 $$; echo noise >&2
case $SLURMD_NODENAME in
  n2) echo "no GPU"; exit 3;;
  n3) echo '{RATES % "NaN"}';;
  n4) sleep 9;;
  *) echo '{RATES % 1.0}';;
esac"""


def test_one_step_tests_all_nodes(tmp_path, monkeypatch):
    """A node that cannot start it, crashes or freezes holds up no other, nor does SLURM's signal to
    all steps.
    """
    files = {"srun": SRUN % tmp_path, "python": TEST}
    for name, text in files.items():
        path = tmp_path / name
        path.write_text(f"#!/usr/bin/env bash\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(node_test, "GRACE_S", 1.0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plan.json").touch()
    found = node_test.tester(0, [])([f"n{i}" for i in (1, 2, 3, 4, 5, 9)])
    assert found.broken == {
        "n2": "the test fails: no GPU (exit code 3)",
        "n3": "the test measures what is no number",
        "n4": "the test does not end in time",
        "n9": "Task launch for S failed on node n9: X",
    }
    assert not found.slow and len((tmp_path / "steps").read_text().split()) == 2


@pytest.mark.parametrize(("dead", "found"), [("", ""), ("23", "23"), ("123", "")])
def test_only_nodes_whose_slurmd_takes_no_connection_are_dead_and_never_all(
    dead: str, found: str, commands, monkeypatch
):
    """Where none does, the network of the node that asks is at fault. A node may have no port of
    its own.
    """
    monkeypatch.setattr(nodes, "PROBE_S", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as slurmd, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        usual = slurmd.getsockname()[1]
        ports = {"1": "", "2": "", "3": f"Port={usual}"}
        ports |= dict.fromkeys(dead, f"Port={closed.getsockname()[1]}")
        lines = "\n".join(
            f"NodeName=n{n} Arch=x NodeAddr=127.0.0.1 {port} Version=22"
            for n, port in ports.items()
        )
        config = f"SlurmdPort              = {usual}"
        commands.say("scontrol", f"echo; [[ $2 == config ]] && echo '{config}' || echo '{lines}'")
        assert nodes.unreachable(["n1", "n2", "n3"]) == [f"n{n}" for n in found]


@pytest.mark.parametrize(
    ("dead", "tasks", "ended"),
    [
        ("c", "a: tasks 0-1|b: task 2|b: task 3", True),
        ("c", "a: tasks 0-1|b: task 2", False),  # one task of b may still save
        ("c", "hello|a: b", False),  # no task has failed
    ],
)
def test_a_step_is_ended_only_where_every_task_of_all_but_dead_nodes_has_ended(
    dead: str, tasks: str, ended: bool, tmp_path, monkeypatch
):
    ledger.note(tmp_path, "started", "7", nodes="x", iteration=0)
    ledger.note(tmp_path, "nodes", "7", chosen=["a", "b", "c"], left_out={})
    monkeypatch.setattr(nodes, "unreachable", lambda _: list(dead))
    lines = iter([f"srun: error: {line}: Exited with exit code 1" for line in tasks.split("|")])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    assert nodes.only_dead_are_left(tmp_path, lines) is ended
    recorded = [event["nodes"] for event in ledger.events(tmp_path, "unreachable")]
    assert recorded == ([["c"]] if ended else [])
