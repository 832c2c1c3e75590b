"""A hang to look at: document 003's, as 320 dumps of TP 8, PP 10, DP 4, made up from what it says of two nodes.

On each node six processes had left train_step and two had not: they stood in the broadcast of the loss. Lines and
functions are the document's; that it was the same two tensor ranks on every node is our choice, and so are the nodes'
numbers.
"""

import json
from pathlib import Path

ROOT = [("pretrain", "megatron/training.py", 187), ("<module>", "pretrain_gpt.py", 239)]
DONE = [("train", "megatron/training.py", 915), *ROOT]

STEP = [
    ("train_batch", "deepspeed/runtime/pipe/engine.py", 330),
    ("train_step", "megatron/training.py", 436),
    ("train", "megatron/training.py", 851),
    *ROOT,
]

LOSS = [
    ("broadcast", "torch/distributed/distributed_c10d.py", 1191),
    ("_aggregate_total_loss", "deepspeed/runtime/pipe/engine.py", 540),
    *STEP,
]

# Our addition: the one rank that, in each of the two broadcasts' groups, never came.
LATE = [("_exec_reduce_tied_grads", "deepspeed/runtime/pipe/engine.py", 249), *STEP]
TP, PP, DP, PER_NODE = 8, 10, 4, 8
WAITING = (3, 6)  # tensor ranks that are still in the broadcast
CULPRITS = (67, 70)  # in stage 2 of replica 0


def write_example(folder: Path) -> Path:
    """The folder, with its 320 dumps and topology.json; left as it is where they are there already."""
    if (folder / "topology.json").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(TP * PP * DP):
        replica, tensor = rank // TP % DP, rank % TP
        stack = LATE if rank in CULPRITS else LOSS if tensor in WAITING and replica == 0 else DONE
        lines = [f"Process {800000 + rank}: python -u pretrain_gpt.py", "Python v3.8.12 (python3.8)", ""]
        lines += [f'Thread {800000 + rank} (active): "MainThread"']
        lines += [f"    {function} ({file}:{line})" for function, file, line in stack]
        (folder / f"rank_{rank}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    hosts = [f"jean-zay-iam{number:02d}" for number in range(1, 1 + TP * PP * DP // PER_NODE)]
    sizes = {"tp": TP, "pp": PP, "dp": DP, "gpus_per_node": PER_NODE, "hosts": hosts}
    (folder / "topology.json").write_text(json.dumps(sizes) + "\n", encoding="utf-8")
    return folder
