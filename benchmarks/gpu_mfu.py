"""How much of a GPU the megatron engine uses, relative to a plain torch GPT: python benchmarks/gpu_mfu.py

One command, unattended, within ten minutes on one card: first correctness (rows of the equality table on CUDA and NCCL,
by both paths), then GPT 1.3B (24 x 2048, 16 heads, 2048 tokens, 50304 rows) in bf16 by the fused path, in nanoGPT's
manner (fp32 weights under autocast, torch.compile, flash attention by torch, fused AdamW) and by the unfused path, in
turns, each in a process of its own; and what the planner says of seconds and memory before any run. Each step survives
the failure of another. Leaves gpu_mfu.json and gpu_mfu.md in --out; exit code 1 where a step failed. The cluster is by
default the first of the catalogue with this card; a card of none is refused, exit code 2: its peak would be another's.

Not run on a GPU yet; `--tiny` runs all of it on a CPU, where it says nothing about speed.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trilane.analysis.benchmark import result
from trilane.analysis.measure import measure
from trilane.config import cluster
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Optimizer, Run
from trilane.costmodel.memory import StageMemory
from trilane.costmodel.predict import IMPOSSIBLE, predict
from trilane.engine.parity import CALM, Row, rows, verify
from trilane.launch.local import environment, train_local

if TYPE_CHECKING:
    import torch

STEPS = ("verify", "fused-1", "plain-1", "unfused-1", "fused-2", "plain-2")
LIMITS_S = {"verify": 170.0}
LIMIT_S = 130.0  # of any other step
WHOLE_S = 590.0
TARGETS = {"H100": 0.50, "H200": 0.50, "A100": 0.58}  # model FLOPs over the peak
TINY: dict[str, Any] = {
    "shape": "2,64,4,32,512",
    "precision": "fp32",
    "mbs": 2,
    "gbs": 4,
    "iterations": 6,
    "leave_out": 2,
}


def main() -> int:
    """Run every step, write the JSON and the page; 2 where the card is of no known cluster, 1 where a step failed."""
    args = arguments()
    if args.step:
        print(json.dumps(STEP[args.step.partition("-")[0]](args)))
        return 0
    if not args.tiny:
        name, bytes_ = card_here()
        args.cluster = args.cluster or next(iter(clusters_of(name, bytes_)), "")
        problem = other_card(cluster.cluster(args.cluster), name, bytes_) if args.cluster else no_card(name)
        if problem:
            print(f"gpu_mfu: {problem}", file=sys.stderr, flush=True)
            return 2
    number = 1
    while (args.out / "gpu_mfu.json").exists():
        number += 1
        args.out = args.out.with_name(f"{args.out.name.removesuffix(f'-{number - 1}')}-{number}")
    args.out.mkdir(parents=True, exist_ok=True)
    args.mbs = args.mbs or fitting(args)
    found = collect(args, run_steps(args))
    (args.out / "gpu_mfu.json").write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "gpu_mfu.md").write_text(page(found))
    print(json.dumps(found, indent=1) if args.json else page(found))
    return 1 if found["failed"] else 0


def run_steps(args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The result of each step, or {"problem": why there is none}; all within WHOLE_S."""
    begin, results = time.monotonic(), dict[str, dict[str, Any]]()
    for step in STEPS:
        left = WHOLE_S - (time.monotonic() - begin)
        limit = min(LIMITS_S.get(step, LIMIT_S), left)
        print(f"gpu_mfu: {step}, at most {limit:.0f} s", file=sys.stderr, flush=True)
        results[step] = apart(step, args, limit) if left > 20 else {"problem": f"no time left of {WHOLE_S:.0f} s"}
        if "problem" in results[step]:
            print(f"gpu_mfu: {step} failed: {results[step]['problem']}", file=sys.stderr, flush=True)
    return results


def apart(step: str, args: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """A step in a process of its own, which gives all memory back, and ends with all it started after `limit_s`."""
    words = ["--step", step, "--out", str(args.out), "--cluster", args.cluster, "--shape", args.shape]
    for name in ("precision", "mbs", "gbs", "recompute", "iterations", "leave_out"):
        words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    command = [sys.executable, __file__, *words, *["--tiny"] * args.tiny]
    begin = time.monotonic()
    with (args.out / f"{step}.log").open("w") as log:
        child = subprocess.Popen(
            command, env=environment(1), stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            printed, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return {"problem": f"longer than {limit_s:.0f} s; see {log.name}"}
    seconds = round(time.monotonic() - begin, 1)
    if child.returncode:
        last = Path(log.name).read_text(errors="replace").strip().splitlines() or ["no output"]
        return {"problem": f"exit code {child.returncode}: {last[-1][:300]}", "took_s": seconds}
    return {**json.loads(printed.splitlines()[-1]), "took_s": seconds}


def card_here() -> tuple[str, float]:
    """Name and bytes of the first GPU, ("", 0) without; a child asks, so that no context of ours lies on the card."""
    asked = "import torch; card = torch.cuda.get_device_properties(0); print(card.total_memory, card.name)"
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    bytes_, _, name = done.stdout.strip().partition(" ")
    return (name, float(bytes_)) if done.returncode == 0 else ("", 0.0)


def other_card(machine: cluster.Cluster, name: str, bytes_: float) -> str:
    """Why the card is not that of the cluster, with those whose card it is; "" where it is."""
    if not name:
        return f"cluster={machine.name}: this machine has no GPU; --tiny runs on a CPU"
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


def clusters_of(name: str, bytes_: float) -> list[str]:
    """The clusters of the catalogue with this card, those of one machine first."""
    found = [other for other in cluster.catalogue() if is_card(cluster.cluster(other).gpu, name, bytes_)]
    return sorted(found, key=lambda other: not other.startswith(("dgx", "h200")))


def no_card(name: str) -> str:
    """Why no cluster was found for a card."""
    return (
        f"card={name}: no cluster of the catalogue has it; --cluster names a JSON file with its peak"
        if name
        else NO_GPU
    )


NO_GPU = "no GPU here; --tiny runs on a CPU"


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; --tiny replaces what it would take a GPU to run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="24,2048,16,2048,50304", help="layers,hidden,heads,seq,vocab")
    parser.add_argument("--cluster", default="", help="whose card: a name of the catalogue or a JSON file")
    parser.add_argument("--precision", default="bf16", choices=cluster.PRECISIONS)
    parser.add_argument("--mbs", type=int, default=0, help="0: the largest of 8, 4, 2, 1 that the planner finds to fit")
    parser.add_argument("--gbs", type=int, default=32)
    parser.add_argument("--recompute", default="none", choices=("none", "selective", "full"))
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--leave-out", type=int, default=6)
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/gpu_mfu"), help="folder of the JSON, the page, the logs"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--step", default="", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.tiny:
        vars(args).update(TINY)
    args.out = args.out.absolute()
    return args


def plan_of(args: argparse.Namespace, fused: bool) -> Plan:
    """The engine's plan: one card, made-up data, no decay."""
    machine = cluster.cluster(args.cluster) if args.cluster else _this_cpu()
    topology = Topology(
        mbs=args.mbs,
        gbs=args.gbs,
        precision=args.precision,
        recompute=args.recompute,
        adam="fused" if fused else "torch",  # the gradients of the engine are in the planner's 18 bytes already
    )
    return Plan(
        label="mfu",
        shape=parse_shape(args.shape),
        cluster=machine,
        topology=topology,
        data=Data(source="mock", folder=str(args.out / "data")),
        optimizer=Optimizer(lr=1e-4, min_lr=1e-4),
        run=Run(train_iters=args.iterations, log_interval=10, fused="on" if fused else "off"),
    )


def fitting(args: argparse.Namespace) -> int:
    """The largest microbatch that the planner finds to fit on both paths."""
    for mbs in (8, 4, 2):
        tried = argparse.Namespace(**{**vars(args), "mbs": mbs})
        if all(predict(plan_of(tried, fused)).oom_probability < IMPOSSIBLE / 5 for fused in (True, False)):
            return mbs
    return 1


def _this_cpu() -> cluster.Cluster:
    """A card of the catalogue with the rate of a core: only a tiny model needs it."""
    card = cluster.cluster("h200")
    return replace(card, name="tiny", gpu=replace(card.gpu, name="core", kind="cpu", fp32_flops_per_s=50e9))


@dataclass(frozen=True, kw_only=True)
class PathRow(Row):
    """A row of the equality table by one of the two paths."""

    fused: str

    @property
    def label(self) -> str:
        return f"{super().label}, fused {self.fused}"

    def plan(self, machine: cluster.Cluster, folder: str) -> Plan:
        plan = super().plan(machine, folder)
        return replace(plan, run=replace(plan.run, fused=self.fused))


def verified(args: argparse.Namespace) -> dict[str, Any]:
    """Rows of the equality table against the fp32 reference on the CPU, by both paths; two cards also train TP2."""
    half = [] if args.tiny else [Row(engine="megatron", topology="one process", precision="bf16", task=CALM)]
    chosen = [Row(engine="megatron", topology="one process"), *half]
    chosen += [row for row in rows(("megatron",)) if row.topology == "TP2"][: 0 if args.tiny else 2]
    table = [PathRow(**{**vars(row), "fused": fused}) for row in chosen for fused in ("off", "on")]
    lines, failed, left_out = list[dict[str, Any]](), 0, list[str]()
    for found in verify(table):
        if isinstance(found, str):
            left_out.append(found)
            continue
        failed += not found.ok
        lines.append(
            {
                "row": found.row.label,
                "max_abs_diff": found.max_abs_diff,
                "bound": found.row.bound,
                "ok": found.ok,
                "problem": found.problem,
            }
        )
    return {"rows": lines, "left_out": left_out, "ok": bool(lines) and not failed}


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of the engine by one path, and its first log line of it."""
    path = args.step.partition("-")[0]
    folder = args.out / args.step
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan_of(args, path == "fused").to_json()))
    terminal, sys.stdout = sys.stdout, sys.stderr  # the last line of stdout is the result
    outcome = train_local(folder, show_progress=False)
    sys.stdout = terminal
    if outcome.status != "completed":
        raise SystemExit(f"{outcome.status}: {outcome.evidence}")
    found = result(measure(folder, args.leave_out))
    steps = [json.loads(line)["sec_per_it"] for line in (folder / "steps.jsonl").read_text().splitlines()]
    lines = (folder / "run.log").read_text(errors="replace").splitlines()
    return {
        "sec_per_it": statistics.median(steps[args.leave_out :]),
        "bytes": found["memory_bytes"]["0"],
        "path": next((line.split("trilane: ")[-1] for line in lines if "fused path (" in line), ""),
        "made_by": found["made_by"],
    }


def plain_step(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of the plain torch GPT; at half the microbatch where it runs out of memory."""
    try:
        return plain(vars(args))
    except RuntimeError as error:
        if "out of memory" not in str(error) or args.mbs == 1:
            raise
    return {**plain({**vars(args), "mbs": args.mbs // 2}), "mbs": args.mbs // 2}


STEP: dict[str, Callable[[argparse.Namespace], dict[str, Any]]]
STEP = {"verify": verified, "fused": engine, "unfused": engine, "plain": plain_step}


def collect(args: argparse.Namespace, results: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """All figures in one object: what was measured, predicted, and failed."""
    plans = {"fused": plan_of(args, True), "plain": plan_of(args, True), "unfused": plan_of(args, False)}
    measured = {}
    for name, plan in plans.items():
        turns = [results[step] for step in STEPS if step.startswith(name) and "problem" not in results[step]]
        if turns:
            measured[name] = summary(turns, plan)
    made_by = next((found["made_by"] for found in results.values() if "made_by" in found), {})
    predicted = {name: prediction(plans[name], measured.get(name)) for name in ("fused", "unfused")}
    found: dict[str, Any] = {
        "date": date.today().isoformat(),
        "card": " ".join(made_by.get("devices", [])),
        "versions": made_by.get("versions", {}),
        "git": made_by.get("git", ""),
        "cluster": plans["fused"].cluster.name,
        "shape": args.shape,
        "parameters": plans["fused"].shape.parameters,
        "precision": args.precision,
        "mbs": args.mbs,
        "gbs": args.gbs,
        "verify": results["verify"],
        "measured": measured,
        "paths": {step: results[step].get("path", "") for step in STEPS if "path" in results[step]},
        "predicted": predicted,
        "failed": {step: found["problem"] for step, found in results.items() if "problem" in found},
    }
    if not results["verify"].get("ok", False) and "verify" not in found["failed"]:
        found["failed"]["verify"] = "a row is above its bound, or did not train"
    return {**found, "targets": targets(found, plans["fused"].cluster.gpu.name)}


def prediction(plan: Plan, measured: Mapping[str, Any] | None) -> dict[str, Any]:
    """The planner's seconds and allocated bytes, before any run here, and their ratios to what was measured."""
    predicted = predict(plan)
    bytes_ = allocated(predicted.stages[0], plan.shape.parameters, plan.topology.adam == "torch")
    found = {
        "sec_per_it": float(predicted.sec_per_it),
        "needed_bytes": float(predicted.memory_bytes),
        "bytes": float(bytes_),
    }
    if measured:
        found["seconds_over_measured"] = found["sec_per_it"] / measured["sec_per_it"]
        found["bytes_over_measured"] = found["bytes"] / measured["max_bytes"]
    return found


def targets(found: Mapping[str, Any], card: str) -> dict[str, str]:
    """What is aimed at -> "met", "missed" or "not measured"; a CPU has no target of speed."""
    measured, predicted = found["measured"], found["predicted"]["fused"]
    verdict = lambda known, met: "not measured" if not known else "met" if met() else "missed"  # noqa: E731
    aims = {"equality": verdict("rows" in found["verify"], lambda: found["verify"]["ok"])}
    least = next((share for name, share in TARGETS.items() if card.startswith(name)), None)
    if least is None:
        return aims
    aims[f"MFU of the fused path at least {least:.0%}"] = verdict(
        "fused" in measured, lambda: measured["fused"]["mfu"] >= least
    )
    both = "fused" in measured and "plain" in measured
    aims["not slower than the plain GPT"] = verdict(
        both, lambda: measured["fused"]["sec_per_it"] <= measured["plain"]["sec_per_it"]
    )
    for name, words, bound in (("seconds", "seconds within 10 %", 0.10), ("bytes", "memory within 5 %", 0.05)):
        ratio = predicted.get(f"{name}_over_measured")
        aims[f"planner's {words}"] = verdict(ratio, lambda r=ratio, b=bound: abs(r - 1) <= b)
    return aims


def allocated(stage: StageMemory, parameters: float, denominator: bool = True) -> float:
    """Bytes of the prediction that max_memory_allocated counts, on one card with torch's Adam.

    States, and the larger of two that never meet: the `denominator` that Adam's foreach form makes in its step (4 bytes
    a parameter, memory.model_states), and activations with what is at work on them. Context, the libraries' buffers and
    what the allocator holds beyond need are not allocated.
    """
    temporary = 4.0 * parameters * denominator
    states = stage.weights + stage.gradients + stage.optimizer - temporary
    return states + max(temporary, stage.activations + stage.working)


def summary(turns: Sequence[Mapping[str, Any]], plan: Plan) -> dict[str, Any]:
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


def page(found: Mapping[str, Any]) -> str:
    """The result as one page of Markdown."""
    lines = [f"# {found['shape']} in {found['precision']} on {found['card'] or 'no card'}, {found['date']}", ""]
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines += [
        f"{found['parameters'] / 1e9:.2f} B parameters, microbatch {found['mbs']}, batch {found['gbs']}; peak and"
    ]
    lines += [f"prediction of cluster {found['cluster']}. {versions}. Commit {found['git'] or 'unknown'}.", ""]
    lines += [f"- **{step} failed**: {problem}" for step, problem in found["failed"].items()]
    lines += ["", "| target | |", "|---|---|", *(f"| {aim} | {verdict} |" for aim, verdict in found["targets"].items())]
    lines += ["", "| | s an iteration | turns | tokens/s | MFU | allocated GiB |", "|---|---|---|---|---|---|"]
    for name, one in found["measured"].items():
        turns = ", ".join(f"{seconds:.4f}" for seconds in one["turns"])
        cells = f"{one['sec_per_it']:.4f} | {turns} | {one['tokens_per_s']:.0f} | {one['mfu']:.1%}"
        lines.append(f"| {name} | {cells} | {one['max_bytes'] / 2**30:.2f} |")
    for name, one in found["predicted"].items():
        ratios = [one.get(f"{what}_over_measured") for what in ("seconds", "bytes")]
        words = [f" ({ratio:.3f} of measured)" if ratio else "" for ratio in ratios]
        cells = f"{one['sec_per_it']:.4f}{words[0]} | | | | {one['bytes'] / 2**30:.2f}{words[1]}"
        lines.append(f"| {name}, predicted | {cells} |")
    lines += ["", *(f"- {step}: {path}" for step, path in found["paths"].items()), ""]
    lines += ["| equality with the fp32 reference | largest difference of a loss | bound |", "|---|---|---|"]
    for row in found["verify"].get("rows", ()):
        differs = row["problem"] or f"{row['max_abs_diff']:.1e}"
        lines.append(f"| {row['row']} | {differs}{'' if row['ok'] else ' **above**'} | {row['bound']:g} |")
    return "\n".join(lines) + "\n"


def plain(values: Mapping[str, Any]) -> dict[str, float]:
    """Median seconds of an iteration after the first ones, and the most bytes of the card (on a CPU: the process)."""
    import torch

    from trilane.engine.report import peak_resident_bytes

    cuda = torch.cuda.is_available()
    device, half = ("cuda" if cuda else "cpu"), {"fp16": torch.float16, "bf16": torch.bfloat16}.get(values["precision"])
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    with torch.device(device):
        whole = model(parse_shape(values["shape"]))
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
