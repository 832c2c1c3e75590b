"""How much of a GPU the megatron engine uses, with and without each lever: python
benchmarks/gpu_mfu.py

One command, unattended, within nine minutes on one card of any kind, in order of importance:
numerics (rows of the equality table on CUDA and NCCL, by both paths), then GPT 1.3B (24 x 2048, 16
heads, 2048 tokens, 50304 rows; bf16, on a V100 fp16) by the engine, by a plain torch GPT in
nanoGPT's manner (fp32 weights under autocast, torch.compile, flash attention by torch, fused
AdamW), and by the engine with one lever changed at a time; what the planner says of seconds and
memory; and memory as `measure plan --trace` has it. Each step is a process of its own, trains as
many iterations as the first ones leave time for, survives the failure of another, and is written to
gpu_mfu.json when it is done: the same command again takes what is missing or failed. Exit code 1
while something is. The cluster is by default the first of the catalogue with this card; a card of
none is refused, exit code 2: its peak would be another's.

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

from trilane.config import cluster
from trilane.config.engines import default_precision, require_trainable
from trilane.config.model import parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan
from trilane.config.training import Data, Optimizer, Run
from trilane.costmodel.memory import StageMemory
from trilane.costmodel.predict import IMPOSSIBLE, predict
from trilane.launch.local import environment
from trilane.utils.process import python
from trilane.utils.validation import require

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/engine"))
from parity import CALM, Row, rows, verify

if TYPE_CHECKING:
    import torch

WHOLE_S, LEAST_S = 540.0, 20.0  # of all steps; what is too little to begin one
LIMIT_S = {"verify": 150.0}, 90.0  # of a step
MEASURED_S, MEASURED, LEFT_OUT = (
    15.0,
    50,
    2,
)  # most seconds and iterations that count; those before them compile
TARGETS = {"H100": 0.50, "H200": 0.50, "A100": 0.55}  # model FLOPs over the peak
# What differs from the engine's own choice on a card: fields of the topology, or of the run
LEVERS: dict[str, dict[str, Any]] = {
    "engine": {},
    "unfused": {"fused": "off", "adam": "torch"},
    "compiled layers": {"fused": "layer"},
    "adam by foreach": {"adam": "torch"},
    "attention by scores": {"attention": "scores"},
    "selective recomputation": {"recompute": "selective"},
    "full recomputation": {"recompute": "full"},
    "Transformer Engine": {"fused": "te"},
    "fp8": {"precision": "fp8"},
}
STEPS = ("verify", "engine", "plain", "trace", *list(LEVERS)[1:])
TINY = {"shape": "2,64,4,32,512", "precision": "fp32", "mbs": 2, "gbs": 4}
SAME = ("shape", "precision", "mbs", "gbs", "cluster", "card")  # of all steps in one file


def main() -> int:
    """Take every step that has no result yet, write the JSON and the page; 2 where it cannot begin,
    1 if one failed.
    """
    args = arguments()
    if args.step:
        args.end = time.monotonic() + args.seconds
        print(
            json.dumps(
                {"verify": verified, "plain": plain, "trace": traced}.get(args.step, engine)(args)
            )
        )
        return 0
    file = args.out / "gpu_mfu.json"
    try:
        prepare(args)
        found = json.loads(file.read_text()) if file.exists() else {"steps": {}}
        asked = {name: getattr(args, name) for name in SAME}
        if other := next(
            (name for name in SAME if found.get(name, asked[name]) != asked[name]), ""
        ):
            raise ValueError(
                f"out={args.out}: has steps with {other}={found[other]}; name another --out"
            )
    except ValueError as error:
        print(f"gpu_mfu: {error}", file=sys.stderr, flush=True)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    begin = time.monotonic()
    for step in (
        name
        for name in args.steps
        if {*found["steps"].get(name, ["problem"])} & {"problem", "not here"}
    ):
        left = args.seconds - (time.monotonic() - begin)
        found["steps"][step] = taken(step, args, min(LIMIT_S[0].get(step, LIMIT_S[1]), left))
        found |= {**asked, "date": date.today().isoformat(), **summary(args, found["steps"])}
        file.write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "gpu_mfu.md").write_text(page(found))
    print(json.dumps(found, indent=1) if args.json else page(found))
    return 1 if found["failed"] else 0


def prepare(args: argparse.Namespace) -> None:
    """Card, cluster, precision and microbatch, where not given; ValueError where there is no such
    card.
    """
    args.card, bytes_ = ("", 0.0) if args.tiny else card_here()
    if not args.tiny:
        require(bool(args.card), "card", "none", "this machine has no GPU; --tiny runs on a CPU")
        args.cluster = args.cluster or next(iter(clusters_of(args.card, bytes_)), "")
        rule = "no cluster of the catalogue has it; --cluster names a JSON file with its peak"
        require(bool(args.cluster), "card", args.card, rule)
        machine = cluster.cluster(args.cluster)
        if problem := other_card(machine, args.card, bytes_):
            raise ValueError(problem)
        args.precision = args.precision or default_precision(machine)
    args.mbs = args.mbs or fitting(args)


def taken(step: str, args: argparse.Namespace, limit_s: float) -> dict[str, Any]:
    """The step's result, or {"problem": why there is none}; it is ended with all it started after
    `limit_s`.
    """
    if reason := absent(step, args):
        return {"not here": reason}
    if limit_s < LEAST_S:
        return {"problem": "no time left; the same command again takes it"}
    print(f"gpu_mfu: {step}, at most {limit_s:.0f} s", file=sys.stderr, flush=True)
    words = [
        "--step",
        step,
        "--out",
        str(args.out),
        "--cluster",
        args.cluster,
        "--seconds",
        str(limit_s),
    ]
    words += [
        word
        for name in ("shape", "precision", "mbs", "gbs")
        for word in (f"--{name}", str(getattr(args, name)))
    ]
    command, begin = [sys.executable, __file__, *words, *["--tiny"] * args.tiny], time.monotonic()
    log = args.out / f"{step}.log"
    with log.open("w") as errors:
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        child = subprocess.Popen(command, env=environment(1), start_new_session=True, **options)
        try:
            printed, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            child.communicate()
            return {"problem": f"longer than {limit_s:.0f} s; see {log}"}
    seconds = round(time.monotonic() - begin, 1)
    if child.returncode:
        last = log.read_text(errors="replace").strip().splitlines() or ["no output"]
        return {"problem": f"exit code {child.returncode}: {last[-1][:300]}", "took_s": seconds}
    return {**json.loads(printed.splitlines()[-1]), "took_s": seconds}


def absent(step: str, args: argparse.Namespace) -> str:
    """Why this machine cannot take a step; "" where it can."""
    try:
        plan = plan_of(args, step if step in LEVERS else "engine")
        require_trainable(plan)
    except ValueError as error:
        return str(error)
    return ""


def card_here() -> tuple[str, float]:
    """Name and bytes of the first GPU, ("", 0) without; a child asks, so that no context of ours
    lies on the card.
    """
    asked = "import torch; card = torch.cuda.get_device_properties(0); print(card.total_memory, card.name)"
    done = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, check=False
    )
    bytes_, _, name = done.stdout.strip().partition(" ")
    return (name, float(bytes_)) if done.returncode == 0 else ("", 0.0)


def other_card(machine: cluster.Cluster, name: str, bytes_: float) -> str:
    """Why the card is not that of the cluster, with those whose card it is; "" where it is."""
    if is_card(machine.gpu, name, bytes_):
        return ""
    others = clusters_of(name, bytes_)
    hint = f"name one of {', '.join(others)}" if others else "name a JSON file with its peak"
    return f"cluster={machine.name}: has {machine.gpu.name}, this card is {name}; {hint}"


def is_card(gpu: cluster.Gpu, name: str, bytes_: float) -> bool:
    """Whether a device of that name is this GPU: 'NVIDIA A100-SXM4-80GB' is an A100-80GB.

    The model's word is in its name, its memory is within 10 %. On PCIe an H100 and a V100 have a
    lower peak (NVIDIA's data sheets), so such a card is only what says so.
    """
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    pcie = "pcie" not in words or "pcie" in gpu.name.lower()
    return (
        gpu.name.split("-")[0].lower() in words
        and abs(bytes_ / gpu.memory_bytes - 1) < 0.1
        and pcie
    )


def clusters_of(name: str, bytes_: float) -> list[str]:
    """The clusters of the catalogue with this card, those of one machine first."""
    found = [
        other for other in cluster.catalogue() if is_card(cluster.cluster(other).gpu, name, bytes_)
    ]
    return sorted(found, key=lambda other: not other.startswith(("dgx", "h200")))


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; --tiny replaces what it would take a GPU to run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shape", default="24,2048,16,2048,50304", help="layers,hidden,heads,seq,vocab"
    )
    parser.add_argument(
        "--cluster", default="", help="whose card: a name of the catalogue or a JSON file"
    )
    parser.add_argument(
        "--precision", default="", choices=("", *cluster.PRECISIONS), help="default: the card's"
    )
    parser.add_argument(
        "--mbs",
        type=int,
        default=0,
        help="0: the largest of 8, 4, 2, 1 that the planner finds to fit",
    )
    parser.add_argument("--gbs", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=WHOLE_S, help="for all steps")
    parser.add_argument(
        "--steps", type=lambda text: text.split(","), default=STEPS, help=", ".join(STEPS)
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/gpu_mfu"), help="folder of JSON, page and logs"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model, on a CPU too")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--step", default="", choices=("", *STEPS), help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if unknown := [step for step in args.steps if step not in STEPS]:
        parser.error(f"--steps={unknown[0]}: must be of {', '.join(STEPS)}")
    if args.tiny:
        vars(args).update(TINY)
    args.out = args.out.absolute()
    return args


def plan_of(args: argparse.Namespace, lever: str = "engine") -> Plan:
    """The engine's plan with a lever: one card, no decay of the rate."""
    machine = cluster.cluster(args.cluster) if args.cluster else _this_cpu()
    own = {"fused": "on" if args.tiny else "auto", "adam": "fused", "precision": args.precision}
    chosen = own | LEVERS[lever]
    fused = chosen.pop("fused")
    return Plan(
        label="mfu",
        shape=parse_shape(args.shape),
        cluster=machine,
        topology=Topology(mbs=args.mbs, gbs=args.gbs, **chosen),
        data=Data(source="mock", folder=str(args.out / "data")),
        optimizer=Optimizer(lr=1e-4, min_lr=1e-4),
        run=Run(train_iters=1000, fused=fused),
    )


def fitting(args: argparse.Namespace) -> int:
    """The largest microbatch that the planner finds to fit on both paths."""
    for mbs in (8, 4, 2):
        tried = argparse.Namespace(**{**vars(args), "mbs": mbs})
        if all(
            predict(plan_of(tried, name)).oom_probability < IMPOSSIBLE / 5
            for name in ("engine", "unfused")
        ):
            return mbs
    return 1


def _this_cpu() -> cluster.Cluster:
    """A card of the catalogue with the rate of a core: only a tiny model needs it."""
    card = cluster.cluster("h200")
    return replace(
        card, name="tiny", gpu=replace(card.gpu, name="core", kind="cpu", fp32_flops_per_s=50e9)
    )


@dataclass(frozen=True, kw_only=True)
class PathRow(Row):
    """A row of the equality table by one of the two paths."""

    fused: str

    def plan(self, machine: cluster.Cluster, folder: str) -> Plan:
        plan = super().plan(machine, folder)
        return replace(plan, run=replace(plan.run, fused=self.fused))


def verified(args: argparse.Namespace) -> dict[str, Any]:
    """Rows of the equality table against the fp32 reference on the CPU, by both paths; two cards
    also train TP2.
    """
    calm = Row(engine="megatron", topology="one process", precision=args.precision, task=CALM)
    chosen = [Row(engine="megatron", topology="one process"), *[calm] * (not args.tiny)]
    chosen += [row for row in rows(("megatron",)) if row.topology == "TP2"][: 0 if args.tiny else 2]
    lines, left_out = list[dict[str, Any]](), list[str]()
    for found in verify(
        [PathRow(**{**vars(row), "fused": fused}) for row in chosen for fused in ("off", "on")]
    ):
        if isinstance(found, str):
            left_out.append(found)
            continue
        facts = {name: getattr(found, name) for name in ("max_abs_diff", "ok", "problem")}
        label = f"{found.row.label}, fused {vars(found.row)['fused']}"
        lines.append({"row": label, "bound": found.row.bound, **facts})
        if time.monotonic() > args.end - 2 * found.seconds - 5:
            left_out.append("rows after this one: no time left")
            break
    return {
        "rows": lines,
        "left_out": left_out,
        "ok": bool(lines) and all(line["ok"] for line in lines),
    }


def engine(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of the real engine with a lever, over made-up tokens, and how
    it computes.
    """
    import torch

    from trilane_engine.cpu import enable_cpu

    enable_cpu()
    from trilane_engine import __main__ as entry
    from trilane_engine import world as worlds
    from trilane_engine.backends.base import Microbatch, build

    plan = plan_of(args, args.step)
    entry.limit_queues(plan, os.environ)
    worlds.single_process(os.environ)
    world = worlds.join(plan)
    made, shape = build(plan, world), plan.shape

    def step() -> None:
        size = (args.mbs, shape.seq_length + 1)
        texts = [
            torch.randint(shape.vocab_size, size, device=world.device)
            for _ in range(plan.topology.microbatches)
        ]
        made.step(
            [
                Microbatch(tokens=t[:, :-1].contiguous(), labels=t[:, 1:].contiguous())
                for t in texts
            ],
            1e-4,
        )

    return {**timed(step, args.end), "path": made.path, "made_by": entry.stamp(world)}


def timed(step: Callable[[], None], end: float) -> dict[str, Any]:
    """Median seconds of an iteration that ends with its loss on the host, and the most bytes (on a
    CPU: the process).

    There are as many as the seconds of the last one say to fit before `end`, and one that counts.
    """
    import torch

    from trilane_engine.report import peak_resident_bytes

    seconds, last = list[float](), 0.0
    while len(seconds) <= LEFT_OUT or time.monotonic() + last < end - 5.0:
        begin = time.perf_counter()
        step()
        seconds.append(last := time.perf_counter() - begin)
        if len(seconds) == LEFT_OUT + MEASURED or sum(seconds[LEFT_OUT:]) > MEASURED_S:
            break
    most = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else peak_resident_bytes()
    first, counted = seconds[:LEFT_OUT], seconds[LEFT_OUT:]
    return {
        "sec_per_it": statistics.median(counted),
        "seconds": counted,
        "first_s": first,
        "bytes": most,
    }


def traced(args: argparse.Namespace) -> dict[str, Any]:
    """What `trilane measure plan --trace` finds the engine to hold, without the card."""
    file = args.out / "plan.json"
    file.write_text(json.dumps(plan_of(args).to_json()))
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "-1"}
    command = python("-m", "trilane", "measure", "plan", str(file), "--trace", "--json")
    (stage,) = json.loads(
        subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout
    )["stages"]
    return {name: stage[name] for name in ("peak_bytes", "flops", "operations")}


def summary(args: argparse.Namespace, steps: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """What was measured and predicted of each plan, the targets, and what failed."""
    measured = {}
    for name in ("plain", *LEVERS):
        if "sec_per_it" not in (found := steps.get(name, {})):
            continue
        plan = plan_of(args, name if name in LEVERS else "engine")
        rate = plan.shape.flops_per_iteration(plan.topology.gbs) / found["sec_per_it"]
        mfu = rate / plan.cluster.gpu.flops_per_s(plan.topology.precision)
        measured[name] = {"sec_per_it": found["sec_per_it"], "mfu": mfu, "bytes": found["bytes"]}
        if name in LEVERS:  # what the planner says before any run
            predicted = predict(plan)
            bytes_ = allocated(
                predicted.stages[0], plan.shape.parameters, plan.topology.adam == "torch"
            )
            measured[name]["seconds_over_measured"] = (
                float(predicted.sec_per_it) / found["sec_per_it"]
            )
            measured[name]["bytes_over_measured"] = float(bytes_) / found["bytes"]
    if "engine" in measured and "peak_bytes" in steps.get("trace", {}):
        measured["engine"]["traced_over_measured"] = (
            steps["trace"]["peak_bytes"] / measured["engine"]["bytes"]
        )
    failed = {name: found["problem"] for name, found in steps.items() if "problem" in found}
    if not steps.get("verify", {}).get("ok", True):
        failed["verify"] = "a row is above its bound, or did not train"
    return {"measured": measured, "targets": targets(measured, args.card), "failed": failed}


def targets(measured: Mapping[str, Mapping[str, float]], card: str) -> dict[str, str]:
    """What is aimed at -> "met" or "missed", of what was measured; a CPU has no target of speed."""
    least = next((share for name, share in TARGETS.items() if name in card), None)
    if least is None or not {"engine", "plain"} <= measured.keys():
        return {}
    engine, plain = measured["engine"], measured["plain"]
    aims = {
        f"MFU at least {least:.0%}": engine["mfu"] >= least,
        "not slower than the plain GPT": engine["sec_per_it"] <= plain["sec_per_it"],
        "planner's seconds within 10 %": abs(engine["seconds_over_measured"] - 1) <= 0.10,
        "planner's memory within 5 %": abs(engine["bytes_over_measured"] - 1) <= 0.05,
        "traced memory within 5 %": abs(engine.get("traced_over_measured", 2) - 1) <= 0.05,
    }
    return {aim: "met" if met else "missed" for aim, met in aims.items()}


def allocated(stage: StageMemory, parameters: float, denominator: bool = True) -> float:
    """Bytes of the prediction that max_memory_allocated counts, on one card with torch's Adam.

    States, and the larger of two that never meet: the `denominator` that Adam's foreach form makes
    in its step (4 bytes a parameter, memory.model_states), and activations with what is at work on
    them. Context, the libraries' buffers and what the allocator holds beyond need are not
    allocated.
    """
    temporary = 4.0 * parameters * denominator
    states = stage.weights + stage.gradients + stage.optimizer - temporary
    return states + max(temporary, stage.activations + stage.working)


def page(found: Mapping[str, Any]) -> str:
    """The result as one page of Markdown."""
    made_by: Mapping[str, Any] = next(
        (one["made_by"] for one in found["steps"].values() if "made_by" in one), {}
    )
    versions = ", ".join(
        f"{name} {version}" for name, version in made_by.get("versions", {}).items()
    )
    lines = [
        f"# {found['shape']} in {found['precision']} on {found['card'] or 'a CPU'}, {found['date']}",
        "",
    ]
    lines += [
        f"Microbatch {found['mbs']}, batch {found['gbs']}; peak and prediction of cluster {found['cluster']}."
    ]
    lines += [f"{versions}. Commit {made_by.get('git') or 'unknown'}.", ""]
    lines += [f"- **{step}**: {problem}" for step, problem in found["failed"].items()]
    lines += [
        f"- {step}: {one['not here']}" for step, one in found["steps"].items() if "not here" in one
    ]
    lines += [
        "",
        "| target | |",
        "|---|---|",
        *(f"| {aim} | {verdict} |" for aim, verdict in found["targets"].items()),
    ]
    columns = (
        "",
        "s an iteration",
        "MFU",
        "of the engine's time",
        "allocated GiB",
        "predicted s",
        "predicted bytes",
    )
    lines += ["", f"| {' | '.join(columns)} | traced bytes |", "|---" * (len(columns) + 1) + "|"]
    for name, one in found["measured"].items():
        relative = one["sec_per_it"] / found["measured"].get("engine", one)["sec_per_it"]
        cells = f"{one['sec_per_it']:.4f} | {one['mfu']:.1%} | {relative:.3f} | {one['bytes'] / 2**30:.2f}"
        ratios = (one.get(f"{what}_over_measured") for what in ("seconds", "bytes", "traced"))
        lines.append(
            f"| {name} | {cells} | {' | '.join(f'x {r:.3f}' if r else '' for r in ratios)} |"
        )
    lines += [
        "",
        *(f"- {step}: {one['path']}" for step, one in found["steps"].items() if "path" in one),
        "",
    ]
    lines += [
        "| equality with the fp32 reference | largest difference of a loss | bound |",
        "|---|---|---|",
    ]
    for row in found["steps"].get("verify", {}).get("rows", ()):
        differs = row["problem"] or f"{row['max_abs_diff']:.1e}"
        lines.append(
            f"| {row['row']} | {differs}{'' if row['ok'] else ' **above**'} | {row['bound']:g} |"
        )
    return "\n".join(lines) + "\n"


def plain(args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and bytes of the plain torch GPT; at half the microbatch where it runs
    out of memory.
    """
    import torch

    half = max(1, args.mbs // 2)
    try:
        return trained(args, args.mbs)
    except torch.OutOfMemoryError:
        return {**trained(args, half), "mbs": half}


def trained(args: argparse.Namespace, mbs: int) -> dict[str, Any]:
    """The plain GPT in its own training loop."""
    import torch

    cuda, shape = torch.cuda.is_available(), parse_shape(args.shape)
    device, half = (
        ("cuda" if cuda else "cpu"),
        {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.precision),
    )
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    torch.manual_seed(0)
    with torch.device(device):
        whole = model(shape)
    adam = torch.optim.AdamW(
        whole.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=cuda
    )
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16" and cuda)
    compiled = (
        torch.compile(whole) if cuda and torch.cuda.get_device_capability() >= (8, 0) else whole
    )
    size, rounds = (mbs, shape.seq_length + 1), args.gbs // mbs

    def step() -> None:
        for _ in range(rounds):
            text = torch.randint(0, shape.vocab_size, size, device=device)
            with torch.autocast(device, half or torch.bfloat16, enabled=half is not None):
                loss = compiled(text[:, :-1], text[:, 1:]) / rounds
            scaler.scale(loss).backward()
        scaler.unscale_(adam)
        torch.nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        scaler.step(adam)
        scaler.update()
        adam.zero_grad(set_to_none=True)
        loss.item()  # waits for the card, as the engine's loss does

    return timed(step, args.end)


def model(shape: Any) -> "torch.nn.Module":
    """GPT-2 in plain torch: tied embeddings, exact GELU, attention by scaled_dot_product_attention;
    gives the loss.
    """
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
            q, k, v = (
                self.qkv(self.norms[0](x)).view(B, T, 3, heads, C // heads).permute(2, 0, 3, 1, 4)
            )
            attended = F.scaled_dot_product_attention(
                q, k, v, is_causal=True
            )  # (B, heads, T, C / heads)
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
