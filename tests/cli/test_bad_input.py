"""Bad input of every command: exit code 2, one line on stderr, and no traceback."""

import json
import shlex

import pytest
from support import small_plan

from trilane.cli.app import main
from trilane.costmodel.calibration import Calibration, to_json

SEARCH = "plan search --shape 6,64,4,32,384 --cluster h200 --gpus 8"
SIZE = "plan size --params 1.3B --vocab 50257 --gpus 8 --cluster jz-a100-80g"
BEST = "plan best --days 14"
SITE = "--site jean-zay-a100"
OTHER = "has other constants than this version (p2p); calibrate or search again"
BAD = [
    ("plan serch", "command=trilane plan: No such command 'serch'. Did you mean 'search'?"),
    ("plan search", "command=trilane plan search: Missing option '--shape'."),
    ("plan search --shape", "command=trilane: Option '--shape' requires an argument."),
    (f"{SEARCH} --gbs 0", "gbs=0: must be a whole number of at least 1"),
    (f"{SIZE} --params 40X", "params=40X: must be a number above zero"),
    (
        "calibrate rows.csv --cluster h200 -o plan.json",
        "output=plan.json: exists; name another file",
    ),
    ("debug bisect plan.json --out plan.json", "out=plan.json: exists; name another"),
    (f"{SEARCH} --gbs 8 --tp 3", "tp=3: no tp x pp x dp with the pinned sizes makes gpus=8"),
    (
        f"{SEARCH} --gbs 8 --cluster jz-v100-32g --precision bf16",
        "V100-32GB has no bf16 matrix units",
    ),
    (f"{SIZE} --tokens 100", "tokens=100.0: one iteration takes gbs x seq_length = 4194304"),
    (f"{SIZE} --like lama", "like=lama: known: bloom, gpt2, llama"),
    (f"{BEST} --cluster dgx-h10", "cluster=dgx-h10: known: "),
    (
        f"{BEST} --cluster h200 --price 1,2",
        "price=1,2: give one for all, or one for each of 1 clusters",
    ),
    ("plan show", "shape=missing: needed where no plan is named"),
    ("plan show plan.json --tp 2", "tp=2: contradicts the plan plan.json"),
    ("decide", "shape=missing: needed where no plan is named"),
    ("decide plan.json --gpus 8", "gpus=8: contradicts the plan plan.json"),
    ("decide plan.json --start 2027-02-01 --deadline 2027-01-31", "deadline=2027-01-31: must not"),
    ("decide plan.json --tokens 0", "tokens=0.0: must be above 0"),
    ("decide plan.json --if tp=3", "if=tp: known: "),
    ("decide plan.json --if price=+30%", "if=price=+30%: price has no number to change"),
    ("plan backtest rows.csv --cv month", "cv=month: known: date, hidden, table"),
    (
        "calibrate rows.csv --cluster h200 -o out.json",
        "rows=1: no different configurations among them can be used, 2 are needed; 1: tp, pp, ",
    ),
    (
        "calibrate nowhere --cluster h200 -o out.json",
        "rows=nowhere: is neither a file, nor a folder with runs",
    ),
    ("plan show old.json", f"calibration=mine: {OTHER}"),
    ("train folder", "plan=folder/plan.json: no such file"),
    ("convert deepspeed plan.json", "engine=megatron: takes no DeepSpeed JSON"),
    ("convert deepspeed --read plan.json --gpus 3 --tp 2", "gpus=3: must be a multiple of tp x pp"),
    ("convert megatron", "plan=missing: give a plan, or --read, or --stubs"),
    ("convert megatron --read job.txt", "cluster=missing: --read needs the cluster"),
    ("convert megatron --stubs damaged", "stubs=damaged: has files; name a new"),
    ("convert megatron --read folder --cluster h200", "read=folder: of 0 calls of its stubs none"),
    (f"slurm chain plan.json c --stages 8:2 {SITE}", "stages="),
    ("logs parse binary", "log=binary: is a binary file, not a log"),
    # what stands after -- is for srun
    ("slurm job end none --code -9 --test -- -N 2", "No such file or directory"),
    ("run 02_topology --study new", "has no sizing.json yet; run 01_sizing first"),
    ("run 02_topolgy", "notebook=02_topolgy: known: "),
    (
        "slurm status dmo",
        "run=dmo: no run folder there, and no study of that name",
    ),
    ("run all -p gsb 8", "parameter=gsb: known: "),
    # an empty variable of a shell is no folder
    ("slurm cancel ''", "run='': is empty"),
    ("debug hang ''", "folder='': is empty"),
    ("plan show odd.json", "calibration=5: must hold name, hash and constants"),
    ("slurm job begin damaged", "jobs.jsonl: line 1 is damaged"),
    ("plan calendar plan.json --tokens 1B --checkpoint-minutes 1e300", "must be at most"),
]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a plan, files that hold several, none or other things, and a binary one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRILANE_OUTPUTS", f"{tmp_path}/outputs")
    plan = small_plan().to_json()

    many = {"plans": [{"id": "1", **plan}, {"id": "2", **plan}]}
    constants = {name: value for name, value in to_json(Calibration()).items() if name != "p2p"}
    old = {**plan, "calibration": {"name": "mine", "hash": "0" * 10, "constants": constants}}
    odd = {**plan, "calibration": 5}
    for name, values in {"old": old, "plan": plan, "many": many, "odd": odd}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(values))
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "rows.csv").write_text("row_id\n1\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/plan.json").write_text(json.dumps(plan))
    (tmp_path / "damaged/jobs.jsonl").write_text('{"event": "nodes", "id": "5", "chosen": "n1"}\n')
    (tmp_path / "outputs/demo").mkdir(parents=True)
    (tmp_path / "outputs/demo/index.html").touch()
    return tmp_path


@pytest.mark.parametrize(("line", "message"), BAD, ids=[line for line, _ in BAD])
def test_bad_input_is_one_line_and_exit_code_2(here, capsys, line, message):
    code = main(shlex.split(line))
    error = capsys.readouterr().err
    assert code == 2 and error.startswith("trilane: ") and error.count("\n") == 1, error
    assert message in error and "Traceback" not in error


@pytest.mark.parametrize("name", ["plan.json", "many.json", "many.json:2", ".", "shown.json"])
def test_any_file_with_a_plan_is_read(here, capsys, name):
    assert main(["plan", "show", "plan.json", "--json"]) == 0
    shown = capsys.readouterr().out
    (here / "shown.json").write_text(shown)
    assert main(["plan", "show", name, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(shown)
