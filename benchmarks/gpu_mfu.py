"""How much of a GPU the megatron engine uses, beside a plain torch GPT on the same card: python benchmarks/gpu_mfu.py

GPT 1.3B (24 x 2048, 16 heads, 2048 tokens, 50304 rows), bf16 or fp16, one card. Each has a process to itself, and they
take turns: engine, plain, engine, plain. The plain one is in the manner of nanoGPT: fp32 weights under autocast,
torch.compile, flash attention by torch, fused AdamW. Then what the planner says of memory that torch allocates, against
max_memory_allocated. A card that is not the cluster's is refused, exit code 2: its peak would be another's.

Not run on a GPU yet; `--toy` runs it on a CPU, where it says nothing about speed.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trilane.config import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Optimizer, Run
from trilane.costmodel.memory import StageMemory
from trilane.costmodel.predict import predict
from trilane.experiments.benchmark import result
from trilane.launch.local import environment, train_local

if TYPE_CHECKING:
    import torch

TURNS = 2
TOY = {
    "shape": "2,64,4,32,512",
    "cluster": "",
    "precision": "fp32",
    "mbs": 2,
    "gbs": 4,
    "iterations": 6,
    "leave_out": 2,
}


def main() -> int:
    """Run both in turns and print one JSON object, or a few lines; 2 where the card is not that of the cluster."""
    args = arguments()
    if args.plain:
        print(json.dumps(plain(json.loads(args.plain))))
        return 0
    problem = "" if args.toy else other_card(cluster.cluster(args.cluster), *card_here())
    if problem:
        print(f"gpu_mfu: {problem}", file=sys.stderr, flush=True)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        found = compare(args, Path(folder))
    print(json.dumps(found, indent=1) if args.json else said(found))
    return 0


def card_here() -> tuple[str, float]:
    """Name and bytes of the first GPU, ("", 0) without; a child asks, so that no context of ours lies on the card."""
    asked = "import torch; card = torch.cuda.get_device_properties(0); print(card.total_memory, card.name)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    bytes_, _, name = done.stdout.strip().partition(" ")
    return (name, float(bytes_)) if done.returncode == 0 else ("", 0.0)


def other_card(machine: cluster.Cluster, name: str, bytes_: float) -> str:
    """Why the card is not that of the cluster, with those whose card it is; "" where it is."""
    if not name:
        return f"cluster={machine.name}: this machine has no GPU; --toy runs on a CPU"
    if is_card(machine.gpu, name, bytes_):
        return ""
    others = [other for other in cluster.catalogue() if is_card(cluster.cluster(other).gpu, name, bytes_)]
    hint = f"name one of {', '.join(others)}" if others else "name a JSON file with its peak"
    return f"cluster={machine.name}: has {machine.gpu.name}, this card is {name}; {hint}"


def is_card(gpu: cluster.Gpu, name: str, bytes_: float) -> bool:
    """Whether a device of that name is this GPU: 'NVIDIA A100-SXM4-80GB' is an A100-80GB.

    The model's word is in its name, its memory is within 10 %. On PCIe an H100 and a V100 have a lower peak (NVIDIA's
    data sheets), so such a card is only what says so.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    pcie = "pcie" not in words or "pcie" in gpu.name.lower()
    return gpu.name.split("-")[0].lower() in words and abs(bytes_ / gpu.memory_bytes - 1) < 0.1 and pcie


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; --toy replaces what it would take a GPU to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="24,2048,16,2048,50304", help="layers,hidden,heads,seq,vocab")
    parser.add_argument("--cluster", default="h200", help="whose card: a name of the catalogue or a JSON file")
    parser.add_argument("--precision", default="bf16", choices=cluster.PRECISIONS)
    parser.add_argument("--mbs", type=int, default=8)
    parser.add_argument("--gbs", type=int, default=64)
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--leave-out", type=int, default=10)
    parser.add_argument("--toy", action="store_true", help="a small model, on a CPU too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--plain", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.toy:
        vars(args).update(TOY)
    return args


def plan_of(args: argparse.Namespace, folder: Path) -> Plan:
    """The engine's plan: one card, made-up data, no decay."""
    machine = cluster.cluster(args.cluster) if args.cluster else _this_cpu()
    topology = Topology(
        mbs=args.mbs,
        gbs=args.gbs,
        precision=args.precision,
        recompute=args.recompute,
        adam="torch",  # the engine's fp32 gradients are in the planner's 18 bytes already: fp32_gradients adds others
    )
    return Plan(
        label="mfu",
        shape=parse_shape(args.shape),
        cluster=machine,
        topology=topology,
        data=Data(source="mock", folder=str(folder / "data")),
        optimizer=Optimizer(lr=1e-4, min_lr=1e-4),
        run=Run(train_iters=args.iterations, log_interval=10),
    )


def _this_cpu() -> cluster.Cluster:
    """A card of the catalogue with the rate of a core: only a toy needs it."""
    from dataclasses import replace

    card = cluster.cluster("h200")
    return replace(card, name="toy", gpu=replace(card.gpu, name="core", kind="cpu", fp32_flops_per_s=50e9))


def compare(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Both, TURNS times in turn, in one run; the better known of two is the median over turns."""
    plan = plan_of(args, folder)
    told: dict[str, list[dict[str, Any]]] = {"engine": [], "plain": []}
    made_by: dict[str, Any] = {}
    for turn in range(TURNS):
        run = folder / f"engine-{turn}"
        run.mkdir()
        (run / "plan.json").write_text(json.dumps(plan.to_json()))
        outcome = train_local(run, show_progress=False)
        if outcome.status != "completed":
            raise SystemExit(f"the engine: {outcome.evidence}")
        found = result(run, args.leave_out)
        made_by = found["made_by"]
        told["engine"].append({"sec_per_it": found["sec_per_it"]["median"], "bytes": found["memory_bytes"]["0"]})
        told["plain"].append(_plain_apart({**vars(args), "gbs": args.gbs}))
    predicted = predict(plan)
    predicted_bytes = allocated(predicted.stages[0], plan.shape.parameters)
    return {
        "date": date.today().isoformat(),
        "card": " ".join(made_by["devices"]),
        "versions": made_by["versions"],
        "git": made_by["git"],
        "shape": args.shape,
        "parameters": plan.shape.parameters,
        "precision": args.precision,
        **{name: summary(turns, plan) for name, turns in told.items()},
        "predicted_needed_bytes": predicted.memory_bytes,
        "predicted_bytes": predicted_bytes,
        "predicted_over_measured": predicted_bytes / max(turn["bytes"] for turn in told["engine"]),
    }


def allocated(stage: StageMemory, parameters: float) -> float:
    """Bytes of the prediction that max_memory_allocated counts, on one card with torch's Adam.

    States, and the larger of two that never meet: the denominator that Adam makes in its step (4 bytes a parameter,
    memory.model_states), and activations with what is at work on them. Context, the libraries' buffers and what the
    allocator holds beyond need are not allocated.
    """
    temporary = 4.0 * parameters
    states = stage.weights + stage.gradients + stage.optimizer - temporary
    return states + max(temporary, stage.activations + stage.working)


def summary(turns: Sequence[Mapping[str, float]], plan: Plan) -> dict[str, Any]:
    """Seconds of each turn, their median, its MFU (FLOPs of ModelShape.flops_per_iteration over the peak), bytes."""
    seconds = [turn["sec_per_it"] for turn in turns]
    median = statistics.median(seconds)
    flops = plan.shape.flops_per_iteration(plan.topology.gbs)
    return {
        "sec_per_it": median,
        "turns": seconds,
        "tokens_per_s": plan.topology.gbs * plan.shape.seq_length / median,
        "mfu": flops / median / plan.cluster.gpu.flops_per_s(plan.topology.precision),
        "max_bytes": max(turn["bytes"] for turn in turns),
    }


def said(found: Mapping[str, Any]) -> str:
    """The result in lines."""
    lines = [f"{found['date']}, {found['card']}, {found['shape']}, {found['precision']}"]
    for name in ("engine", "plain"):
        one = found[name]
        turns = ", ".join(f"{seconds:.4f}" for seconds in one["turns"])
        lines.append(
            f"{name}: {one['sec_per_it']:.4f} s ({turns}), {one['tokens_per_s']:.0f} tokens/s, MFU {one['mfu']:.1%}"
        )
    ratio = found["predicted_over_measured"]
    memory = f"memory: predicted {found['predicted_bytes'] / 2**30:.2f} GiB allocated, {ratio:.3f} of measured"
    return "\n".join([*lines, f"{memory} ({found['predicted_needed_bytes'] / 2**30:.2f} GiB needed in all)"])


def _plain_apart(values: Mapping[str, Any]) -> dict[str, float]:
    """The plain one in a process of its own, which gives all memory back."""
    command = [sys.executable, __file__, "--plain", json.dumps(values)]
    done = subprocess.run(command, env=environment(1), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the plain one:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def plain(values: Mapping[str, Any]) -> dict[str, float]:
    """Median seconds of an iteration after the first ones, and the most bytes of the card (on a CPU: the process)."""
    import torch

    from trilane.engine.monitor.report import peak_resident_bytes

    cuda = torch.cuda.is_available()
    device, half = ("cuda" if cuda else "cpu"), {"fp16": torch.float16, "bf16": torch.bfloat16}.get(values["precision"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    whole = model(parse_shape(values["shape"])).to(device)
    adam = torch.optim.AdamW(whole.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda)
    scaler = torch.amp.GradScaler(device, enabled=values["precision"] == "fp16" and cuda)
    step = torch.compile(whole) if cuda else whole
    size, steps = (values["mbs"], parse_shape(values["shape"]).seq_length + 1), values["gbs"] // values["mbs"]
    seconds = []
    for _ in range(values["iterations"]):
        begin = time.perf_counter()
        for _ in range(steps):
            text = torch.randint(0, parse_shape(values["shape"]).vocab_size, size, device=device)
            with torch.autocast(device, half or torch.bfloat16, enabled=half is not None):
                loss = step(text[:, :-1], text[:, 1:]) / steps
            scaler.scale(loss).backward()
        scaler.unscale_(adam)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        scaler.step(adam)
        scaler.update()
        adam.zero_grad(set_to_none=True)
        loss.item()  # waits for the card, as the engine's loss does
        seconds.append(time.perf_counter() - begin)
    most = torch.cuda.max_memory_allocated() if cuda else peak_resident_bytes()
    return {"sec_per_it": statistics.median(seconds[values["leave_out"] :]), "bytes": most}


def model(shape: Any) -> "torch.nn.Module":
    """GPT-2 in plain torch: tied embeddings, exact GELU, attention by scaled_dot_product_attention; gives the loss."""
    import torch.nn.functional as F
    from torch import nn

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            h = shape.hidden_size
            self.norms = nn.ModuleList([nn.LayerNorm(h), nn.LayerNorm(h)])
            self.qkv, self.proj = nn.Linear(h, 3 * h), nn.Linear(h, h)
            self.up, self.down = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

        def forward(self, x: "torch.Tensor") -> "torch.Tensor":
            B, T, C = x.shape
            heads = shape.num_attention_heads
            q, k, v = self.qkv(self.norms[0](x)).view(B, T, 3, heads, C // heads).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, heads, T, C / heads)
            x = x + self.proj(attended.transpose(1, 2).reshape(B, T, C))
            return x + self.down(F.gelu(self.up(self.norms[1](x))))

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(shape.vocab_size, shape.hidden_size)
            self.places = nn.Embedding(shape.seq_length, shape.hidden_size)
            self.layers = nn.ModuleList(Layer() for _ in range(shape.num_layers))
            self.norm = nn.LayerNorm(shape.hidden_size)
            for weights in (p for p in self.parameters() if p.dim() == 2):
                nn.init.normal_(weights, std=0.02)

        def forward(self, tokens: "torch.Tensor", labels: "torch.Tensor") -> "torch.Tensor":
            x = self.words(tokens) + self.places.weight[: tokens.shape[1]]
            for layer in self.layers:
                x = layer(x)
            logits = self.norm(x) @ self.words.weight.T
            return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    return Whole()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)
