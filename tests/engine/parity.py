"""Engines, topologies and precisions that must reproduce the losses of one process, trained here.

`trilane measure engines [ENGINE...]` trains the rows of these engines, else all.
"""

import gc
import json
import math
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trilane.config.cluster import Cluster, cluster
from trilane.config.engines import ENGINES
from trilane.config.model import ModelShape, parse_shape
from trilane.config.parallelism import Topology
from trilane.config.plan import Plan, read_plan
from trilane.config.training import Data, Optimizer, Run
from trilane.utils.process import PARENT, context, die_with_parent, held_port

sys.path.insert(0, str(Path(__file__).parent))  # of `reference`
SHAPE = parse_shape("4,64,4,64,512")
OPTIMIZER = Optimizer(lr=2e-3, min_lr=2e-4, warmup_samples=40, decay_samples=160)
BLOOM = replace(SHAPE, embedding_layernorm=True, positions="alibi", activation="gelu-tanh")
LLAMA = replace(
    SHAPE,
    num_key_value_heads=2,
    activation="swiglu",
    ffn_hidden_size=176,
    tied_embeddings=False,
    biases="none",
    normalization="rmsnorm",
    positions="rotary",
    norm_epsilon=1e-6,
    rotary_base=5e5,
)
# softmax over the chosen, and a loss that balances experts
MIXTURE = replace(LLAMA, experts=8, top_k=2, expert_ffn=64, aux_loss=0.02)
# softmax over all, a gated expert that all tokens go to, a dense layer in front
SHARED = replace(
    LLAMA,
    experts=4,
    top_k=2,
    expert_ffn=64,
    shared_experts=2,
    shared_ffn=32,
    shared_gate=True,
    first_dense=1,
    router_pre_softmax=True,
    router_scaling=1.5,
)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What rows have in common: model, optimizer and batch, and so the reference."""

    shape: ModelShape = SHAPE
    optimizer: Optimizer = OPTIMIZER
    mbs: int = 2
    gbs: int = 8

    def plan(
        self, machine: Cluster, folder: str, engine: str = "megatron", **topology: Any
    ) -> Plan:
        """20 iterations over Python's standard library, a tenth of it held out."""
        return Plan(
            label="equality",
            engine=engine,
            shape=self.shape,
            cluster=machine,
            topology=Topology(**{"mbs": self.mbs, "gbs": self.gbs, **topology}),
            data=Data(source="stdlib", folder=folder, split="90,10"),
            optimizer=self.optimizer,
            run=Run(train_iters=20, eval_interval=10, eval_iters=1),
        )


# A learning rate and batch that 8 bits of mantissa can follow: on the plain task, where the loss
# falls from 6.2 to 4.3 in 20 iterations, bf16 differs by up to 3.8e-3 in every engine.
CALM = Task(optimizer=replace(OPTIMIZER, lr=5e-4, min_lr=5e-5), mbs=4, gbs=32)
TASKS = {
    "plain": Task(),
    "calm": CALM,
    "bloom": Task(shape=BLOOM),
    "llama": Task(shape=LLAMA),
    "mixture": Task(shape=MIXTURE),
    "shared": Task(shape=SHARED),
    "apertus": Task(
        shape=replace(
            LLAMA,
            kv_channels=32,
            qk_layernorm=True,
            activation="xielu",
            no_rope_freq=2,
            tied_embeddings=True,
        )
    ),
    # On the task of "llama" fp16 skips iterations: a gradient times the first loss scale is beyond
    # its range.
    "calm llama": replace(CALM, shape=LLAMA),
    "calm mixture": replace(CALM, shape=MIXTURE),
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """An engine on a topology in a precision, compared with the reference of its task."""

    engine: str
    topology: str
    precision: str = "fp32"
    settings: dict[str, Any] = field(default_factory=dict)
    task: Task = TASKS["plain"]

    @property
    def label(self) -> str:
        return f"{self.engine} {self.topology} {self.precision}"

    @property
    def bound(self) -> float:
        """Largest permitted |difference of a loss| from the fp32 reference over all iterations."""
        if self.precision != "fp32":
            return 2e-3
        return 2e-6 if self.task.shape.experts else 1e-5

    def plan(self, machine: Cluster, folder: str) -> Plan:
        """The row as a plan on `machine`. ValueError where the machine cannot train it."""
        settings = {**self.settings, "precision": self.precision}
        return self.task.plan(machine, folder, self.engine, **settings)


def rows(engines: Sequence[str] = ENGINES) -> list[Row]:
    """The rows of equality.json for these engines, fp32 first."""
    table = json.loads(Path(__file__).with_name("equality.json").read_text())
    every = [Row(**{**row, "task": TASKS[row["task"]]}) for row in table]
    return [row for row in every if row.engine in engines]


@dataclass(frozen=True, kw_only=True)
class Result:
    """The largest |difference of loss| of a row, None where it did not train, inf for a NaN."""

    row: Row
    max_abs_diff: float | None
    seconds: float
    problem: str = ""

    @property
    def ok(self) -> bool:
        return self.max_abs_diff is not None and self.max_abs_diff <= self.row.bound

    def __str__(self) -> str:
        outcome = self.problem or f"{self.max_abs_diff:.1e}, bound {self.row.bound:g}"
        verdict = "ok" if self.ok else "FAILED"
        return f"{self.row.label:65s} {self.seconds:5.1f} s  {verdict}: {outcome}"


def verify(table: Sequence[Row]) -> Iterator[Result | str]:
    """The result of each row in turn; a line of text instead where this machine cannot train it."""
    import torch

    load()
    references: dict[Task, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="trilane-verify-") as place:
        cards = gpu_count()
        here = machine(cards, bf16=not cards or torch.cuda.get_device_capability() >= (8, 0))
        for number, row in enumerate(table):
            try:
                plan = row.plan(here, f"{place}/data")
            except ValueError as error:
                yield f"{row.label}: left out, {error}"
                continue
            if row.task not in references:
                alone = row.task.plan(here, f"{place}/data")
                references[row.task] = _losses(alone, 0, Path(place, f"{number} alone"))
            begun = time.monotonic()
            worst, problem = None, ""
            try:
                losses = _losses(plan, plan.topology.gpus, Path(place, str(number)))
                pairs = zip(losses, references[row.task], strict=True)
                differences = [abs(a - b) for a, b in pairs]
                worst = math.inf if any(map(math.isnan, differences)) else max(differences)
            except RuntimeError as error:
                problem = str(error)
            seconds = time.monotonic() - begun
            yield Result(row=row, max_abs_diff=worst, seconds=seconds, problem=problem)


def _losses(plan: Plan, processes: int, folder: Path) -> list[float]:
    """Of iterations and evaluations; RuntimeError with the last line of workers that failed."""
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(plan.to_json()), encoding="utf-8")
    printed = output(folder, train(processes, folder)).strip()
    if printed:
        raise RuntimeError(printed.splitlines()[-1])
    text = "".join((folder / f"{name}.jsonl").read_text() for name in ("steps", "validation"))
    return [json.loads(line)["lm_loss"] for line in text.splitlines()]


def output(folder: Path, codes: Sequence[int], wanted: int = 0) -> str:
    """What the workers printed, where an exit code is not the wanted one; else ""."""
    logs = "\n".join(log.read_text(errors="replace") for log in sorted(folder.glob("*.log")))
    return "" if set(codes) == {wanted} else f"exit codes {codes}\n{logs}"


# the number of workers (0: the reference) and the run folder -> an exit code
Work = Callable[[int, Path], int]


def train(processes: int, folder: Path, work: Work | None = None) -> list[int]:
    """The exit codes of so many workers that train `folder`/plan.json, or do other `work`."""
    with held_port() as port:
        workers = begin(processes, port, folder, work)
        for worker in workers:
            worker.join()
    return [worker.exitcode for worker in workers]


def begin(processes: int, port: int, folder: Path, work: Work | None = None) -> list[Any]:
    """The workers of train(), as processes of multiprocessing that have started."""
    # Forked workers share what load() imported. CUDA does not survive a fork: with a GPU each
    # worker is a new process.
    processing = context("spawn" if gpu_count() else "fork")
    given = (processes, port, folder, work or run_worker, os.getpid())
    ranks = range(max(1, processes))
    workers = [processing.Process(target=_worker, args=(rank, *given)) for rank in ranks]
    for worker in workers:
        worker.start()
    return workers


def _worker(rank: int, size: int, port: int, folder: Path, work: Work, parent: int) -> None:
    """Do the work in the environment that torchrun would give it, and end this process."""
    world = str(max(1, size))
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TRILANE_RANK_LOGS=str(folder))
    os.environ[PARENT] = str(parent)
    code = 1
    try:
        code = work(size, folder)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # threads of the libraries are not waited for


def run_worker(size: int, folder: Path) -> int:
    """Run the engine; of size 0 the reference, which writes the same files, losses and
    norms alone.
    """
    if size:
        from trilane_engine.__main__ import main as engine

        return engine([f"{folder}/plan.json"])
    die_with_parent()
    import torch

    from trilane_engine.cpu import enable_cpu

    enable_cpu()
    import reference

    torch.set_num_threads(1)
    steps, evaluations = reference.train(read_plan(folder / "plan.json"))
    for name, lines in (("steps.jsonl", steps), ("validation.jsonl", evaluations)):
        (folder / name).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return 0


def load() -> None:
    """Import what workers need, unless there is a GPU."""
    if gpu_count():
        return
    from trilane_engine.cpu import enable_cpu

    enable_cpu()
    # transformers imports a model's code when it is first asked for
    import reference  # noqa: F401
    from transformers import BloomForCausalLM, GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM  # noqa: F401

    import trilane_engine.backends.deepspeed_3d
    import trilane_engine.backends.hf_zero3
    import trilane_engine.backends.megatron
    import trilane_engine.loop  # noqa: F401

    gc.freeze()  # a collection in a worker would copy every page that it shares with this process


def gpu_count() -> int:
    import torch

    return torch.cuda.device_count()


def machine(cards: int, bf16: bool) -> Cluster:
    """A machine of `cards` GPUs, or of eight processes; nothing is predicted from its speeds."""
    like = cluster("jz-a100-80g")
    gpu = replace(like.gpu, name="GPU" if cards else "CPU core", kind="cuda" if cards else "cpu")
    if not bf16:
        gpu = replace(gpu, bf16_flops_per_s=0.0)
    return replace(like, name="this machine", gpu=gpu, gpus_per_node=cards or 8, max_nodes=1)


def main(argv: Sequence[str]) -> int:
    """0 where every row is within its bound, else 1."""
    # Waiting threads that spin take the core from other processes; libgomp reads this when torch is
    # imported.
    os.environ |= {"GOMP_SPINCOUNT": "1000", "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
    results = []
    for outcome in verify(rows(argv or ENGINES)):
        print(outcome, flush=True)
        if isinstance(outcome, Result):
            results.append(outcome)
    return int(not results or not all(result.ok for result in results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
