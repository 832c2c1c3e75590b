"""Which nodes of a job train, by what the test of each alone, and of pairs, finds; which ones later
jobs avoid.
"""

import math
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from slurm_cluster import Commands

from trilane.slurm import ledger
from trilane.workspace.status import read_status
from trilane.workspace.study import load_cluster
from trilane_diagnose import node_test, nodes
from trilane_diagnose.node_test import Group, Result
from trilane_engine.bench import node_test as gpu_health
from trilane_engine.bench import rates
from trilane_engine.world import World

FAST = {"matmul FLOP/s": 100.0, "PCIe B/s": 10.0}


class Nodes:
    """Nodes with their speed (1: as the others, 0: broken) alone and in a network."""

    def __init__(
        self, alone: dict[str, float], network: dict[str, float], doubtful: Sequence[str] = ()
    ) -> None:
        self.alone, self.network, self.doubtful = alone, network, doubtful

    def __call__(self, mode: str, groups: Sequence[Group]) -> dict[Group, Result]:
        return {group: self.result(mode, group) for group in groups}

    def result(self, mode: str, group: Group) -> Result:
        if mode == "pair":
            share = min(self.network.get(node, 1.0) for node in group)
            return (
                Result(rates={"all_reduce B/s": 5.0 * share})
                if share
                else Result(broken="no answer")
            )
        share, doubtful = (
            self.alone.get(group[0], 1.0),
            "ECC errors" if group[0] in self.doubtful else "",
        )
        rates = {k: v * share for k, v in FAST.items()}
        return Result(rates=rates, doubtful=doubtful) if share else Result(broken="no GPU")


@pytest.mark.parametrize(
    ("count", "alone", "network", "broken", "slow"),
    [
        (4, {}, {}, "", ""),
        (2, {"b": 0.7}, {}, "", "b"),
        (2, {"b": 0.8}, {}, "", ""),
        (3, {"a": 0.4, "b": 0.4, "c": 0.4}, {}, "", ""),  # all slow: nothing to compare with
        (4, {"a": 0.0}, {}, "a", ""),
        (2, {"a": 0.0, "b": 0.0}, {}, "", ""),  # the test's own fault
        (2, {}, {"b": 0.0}, "", ""),  # which of the two?
        (4, {}, {"b": 0.0}, "b", ""),  # its mate does well with another
        (4, {}, {"b": 0.0, "a": 0.0}, "ab", ""),
        (6, {}, {"c": 0.3}, "", "c"),
        (6, {"b": 0.5, "c": 0.4}, {}, "", "bc"),  # two slow nodes
        (7, {}, {"c": 0.6, "g": 0.0}, "", ""),  # the odd one is in no pair
        (9, {"a": 0.0}, {"d": 0.0}, "ad", ""),  # pairs are of those that work alone
    ],
)
def test_what_is_slow_or_broken_is_found_alone_and_in_pairs(
    count: int, alone: dict[str, float], network: dict[str, float], broken: str, slow: str
) -> None:
    found = node_test.findings("abcdefghi"[:count], Nodes(alone, network), is_cpu=False)
    assert ("".join(found.broken), "".join(found.slow)) == (broken, slow)


def test_what_all_nodes_lack_of_the_cluster_file_is_refused_without_a_requeue(
    tmp_path: Path, commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL over TCP: no node is slower than the others, and a plan would take ten times as long."""
    cluster = load_cluster("juwels-booster")
    medians = {"matmul FLOP/s": 2e14, "all_reduce B/s": 0.8 * cluster.network_bytes_per_s}
    assert not node_test.far_below(medians, cluster, 4)
    # one GPU of four has a network card of its own
    medians["all_reduce B/s"] = cluster.network_bytes_per_s / 20
    assert not node_test.far_below(medians, cluster, 1)
    refused = node_test.far_below(medians, cluster, 4)
    assert re.fullmatch(
        r"all nodes: all_reduce B/s 5e\+09, the cluster file has 1e\+11: does NCCL .*", refused
    )
    commands.say(
        "scontrol", 'case $* in *hostnames*) printf "n1\\nn2\\n";; *requeue*) exit 9;; esac'
    )
    with pytest.raises(ValueError, match="does NCCL run over TCP"):
        nodes.start_nodes(
            tmp_path,
            2,
            lambda _: node_test.Findings(refused=refused),
            {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"},
        )
    assert "NCCL" in read_status(tmp_path).evidence


def test_a_node_that_may_fail_is_left_out_before_the_others_and_a_slow_one_before_it() -> None:
    found = node_test.findings("abcd", Nodes({"a": 0.5}, {}, doubtful=["b"]), is_cpu=False)
    for count, wanted in ((2, "cd"), (3, "bcd"), (4, "abcd")):
        chosen, left_out = nodes.choose("abcd", count, found.broken, found.slow)
        assert "".join(chosen) == wanted, "in the order of the job"
        assert set(left_out) == set("abcd") - set(wanted)
    rule = r"^nodes=a,c: the plan needs 3 nodes, and 2 of the job's 3 are left: b: no GPU$"
    with pytest.raises(ValueError, match=rule):
        nodes.choose("abc", 3, {"b": "no GPU"}, {})


CARDS = {
    "gpu index,memory.used": [["0", "4"], ["1", "5"]],
    "gpu index,ecc.errors.uncorrected.volatile.total": [["0", "0"], ["1", "[N/A]"]],
    "remapped-rows gpu_bus_id,remapped_rows.failure": [["A", "0"], ["B", "No"]],
}


@pytest.mark.parametrize(
    ("change", "broken", "doubtful"),
    [
        ({}, "", ""),
        ({name: [] for name in CARDS}, "", ""),  # no nvidia-smi, or one that knows none of it
        ({"memory.used": [["0", "4"]]}, "1 of 2 GPUs", ""),
        (
            {"memory.used": [["0", "4"], ["1", "30000"]]},
            "GPU 1: 29.3 GiB in use before the training",
            "",
        ),
        ({"volatile": [["0", "3"]]}, "", "GPU 0: 3 uncorrectable ECC errors since its last reset"),
        ({"remapped": [["A", "1"]]}, "GPU A: its memory has no rows left to remap", ""),
    ],
)
def test_the_health_of_gpus_is_what_nvidia_smi_reports(
    change: dict, broken: str, doubtful: str
) -> None:
    def ask(what: str, names: str) -> list[list[str]]:
        key = f"{what} {names}"
        return next((rows for word, rows in change.items() if word in key), CARDS[key])

    found = gpu_health.findings(2, ask)
    assert found == {"broken": [broken] * bool(broken), "doubtful": [doubtful] * bool(doubtful)}


@pytest.mark.parametrize(
    ("value", "found"), [(None, []), (math.nan, ["a matmul in fp32 gives wrong results"])]
)
def test_a_node_that_answers_but_computes_wrong_is_broken(
    value: float | None, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mm = torch.mm

    def planted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = mm(a, b)
        if value is not None:
            out[3, 5] = value
        return out

    monkeypatch.setattr(torch, "mm", planted)
    assert (
        rates.wrong(World(rank=0, size=1, local_rank=0, local_size=1, device=torch.device("cpu")))
        == found
    )


def test_one_step_tests_all_nodes_round_by_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that cannot start it, crashes or freezes holds up no other, nor does SLURM's signal to
    all steps; one with a copy of the environment imports from there.
    """
    rates = '{"broken": [], "doubtful": [], "rates": {"matmul FLOP/s": %s}}'
    for name, text in {
        # a task for each node of the list, all with the lines of its input
        "srun": f"""while [[ $1 == --* ]]; do [[ $1 != --nodelist=* ]] || names=${{1#*=}}; shift; done
            echo "$names" >>{tmp_path}/steps
            [[ $names != *n9* ]] || {{ echo "srun: error: Task launch for S failed on node n9: X" >&2; exit 1; }}
            while read -r line; do for n in ${{names//,/ }}; do SLURMD_NODENAME=$n "$@" <<<"$line" & done; done""",
        "python": f"""kill -USR1 $$; echo noise >&2
            case $SLURMD_NODENAME in n2) echo "no GPU"; exit 3;; n3) echo '{rates % "NaN"}';; n4) sleep 9;;
            *) echo '{rates % 1.0}';; esac""",
        "n6/bin/python": "echo staged; exit 4",
        "n6/ready": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("TRILANE_STAGED", f"{tmp_path}/$SLURMD_NODENAME")
    monkeypatch.setattr(node_test, "GRACE_S", 1.0)
    found = node_test.tester(0, [])([f"n{i}" for i in (1, 2, 3, 4, 5, 6, 9)])
    assert found.broken == {
        "n2": "the test fails: no GPU (exit code 3)",
        "n3": "the test measures what is no number",
        "n4": "the test does not end in time",
        "n6": "the test fails: staged (exit code 4)",
        "n9": "Task launch for S failed on node n9: X",
    }
    assert not found.slow and len((tmp_path / "steps").read_text().split()) == 2


def test_each_task_finds_its_place_in_its_group_and_the_sites_network() -> None:
    """Rank 0 is the first GPU of the first node of a pair, by its name on InfiniBand; a group has a
    port of its own.
    """
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "1",
        "HOST_SUFFIX": "i",
        "SLURMD_NODENAME": "n3",
        "SLURM_LOCALID": "1",
    }
    mode, own = gpu_health.place(2, "2 pair n1,n2 n4,n3", env)
    assert mode == "pair" and own.pop("MASTER_ADDR") == "n4i"
    other = gpu_health.place(2, "2 pair n1,n2 n4,n3", {**env, "SLURMD_NODENAME": "n1"})[1]
    assert own.pop("MASTER_PORT") != other["MASTER_PORT"]
    assert own == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    assert gpu_health.place(2, "2 pair n1,n2", env) == ("pair", {})


@pytest.mark.parametrize(("dead", "found"), [("", ""), ("23", "23"), ("123", "")])
def test_only_nodes_whose_slurmd_takes_no_connection_are_dead_and_never_all(
    dead: str, found: str, commands: Commands
) -> None:
    """Where none does, the network of the node that asks is at fault. A node may have no port of
    its own.
    """
    with socket.create_server(("127.0.0.1", 0)) as slurmd, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        usual, none = slurmd.getsockname()[1], closed.getsockname()[1]
        ports = {n: f"Port={none}" if n in dead else f"Port={usual}" * (n == "3") for n in "123"}
        lines = "\n".join(
            f"NodeName=n{n} Arch=x NodeAddr=127.0.0.1 {port} Version=22"
            for n, port in ports.items()
        )
        commands.say(
            "scontrol",
            f"echo; [[ $2 == config ]] && echo 'SlurmdPort              = {usual}' || echo '{lines}'",
        )
        assert nodes.unreachable(["n1", "n2", "n3"], within_s=1.0) == [f"n{n}" for n in found]


@pytest.mark.parametrize(
    ("dead", "tasks", "ended"),
    [
        ("c", "a: tasks 0-1|b: task 2|b: task 3", True),
        ("c", "a: tasks 0-1|b: task 2", False),  # one task of b may still save
        ("", "a: tasks 0,1|b: tasks 2-3|c: tasks 4,5", False),
        ("c", "hello|a: b", False),  # no task has failed
    ],
)
def test_a_step_is_ended_only_where_every_task_of_all_but_dead_nodes_has_ended(
    dead: str, tasks: str, ended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger.note(tmp_path, "started", "7", nodes="x", iteration=0)
    ledger.note(tmp_path, "nodes", "7", chosen=["a", "b", "c"], left_out={})
    monkeypatch.setattr(nodes, "unreachable", lambda *_: list(dead))
    lines = iter([f"srun: error: {line}: Exited with exit code 1" for line in tasks.split("|")])
    env = {"SLURM_JOB_ID": "7", "SLURM_NTASKS_PER_NODE": "2"}
    assert nodes.only_dead_are_left(tmp_path, lines, env) is ended
    assert [e["nodes"] for e in ledger.events(tmp_path, "unreachable")] == [["c"]] * ended
