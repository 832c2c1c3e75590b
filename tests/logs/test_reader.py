"""What a log's lines show about order: whose iterations they are, which numbers they have, when and where they stand."""

import json

import pytest
from test_dialects import NANOTRON
from test_log_dialects import FORK, m2021

from trilane.analysis.measure import measure_log
from trilane.logs.dialects import tables
from trilane.logs.reading.blocks import blocks
from trilane.logs.reading.reader import Reader
from trilane.logs.run import read_log, read_logs
from trilane.logs.table import frame

# deepspeed/runtime/engine.py and deepspeed/utils/timer.py of https://github.com/deepspeedai/DeepSpeed
RESUMED = (
    "[2026-01-01 10:{m:02d}:{s:02d},{ms:03d}] [INFO] [logging.py:96:log_dist] [Rank 0] step={i}, skipped=4, lr=[4.9e-05], mom=[(0.9, 0.95)]\n"
    "[2026-01-01 10:{m:02d}:{s:02d},{ms:03d}] [INFO] [timer.py:1:stop] epoch=0/micro_step={g}/global_step={g}, RunningAvgSamplesPerSec=30.5, CurrSamplesPerSec=31.5\n"
)
COUNTS = ">>   Num examples = 8,000\n>>   Num Epochs = 3\n>>   Total optimization steps = 1,500\n"


# https://github.com/pytorch/torchtitan/blob/main/torchtitan/components/metrics.py
TITAN = "[titan] 2026-05-18 16:{m:02d}:{s:02d},958 - root - INFO - step: {i:2d}  loss: {loss:7.4f}  grad_norm:  0.5348  memory:  9.50GiB(64.99%)  tps: {tps:,}  tflops: 0.50  mfu: 1.50%\n"


def runs(folder, text):
    (folder / "a.log").write_text(text)
    return read_logs(folder / "a.log")


def deepspeed(first, at=0):
    lines = []
    for k in range(1, 6):
        ms = 17100 * k  # five iterations of 3.42 s
        lines.append(RESUMED.format(m=at + ms // 60000, s=ms // 1000 % 60, ms=ms % 1000, i=first + 5 * k, g=5 * k))
    return "".join(lines)


@pytest.mark.parametrize("reverse", [False, True])
def test_steps_since_the_start_of_the_process_are_no_iterations_of_a_resumed_run(tmp_path, reverse):
    text = deepspeed(136000)
    if reverse:
        lines = text.splitlines(True)
        text = "".join(lines[i + 1] + lines[i] for i in range(0, 10, 2))
    (log,) = runs(tmp_path, text)
    assert list(log.iterations["iteration"]) == [136005, 136010, 136015, 136020, 136025]
    assert log.iterations["sec_per_it"].median() == pytest.approx(3.42, rel=1e-3)
    assert set(log.iterations["samples_per_second"].dropna()) == {31.5}


def test_two_resumed_runs_of_deepspeed_are_two(tmp_path):
    found = runs(tmp_path, deepspeed(136000) + deepspeed(136010, at=30))
    assert [log.iterations["iteration"].iloc[0] for log in found] == [136005, 136015]


def trainer(numbers, extra="", epoch=500):
    return "".join(
        f"{{'loss': {9 - k / 10}, 'epoch': {round(n / epoch, 2)}{extra.format(n=n)}}}\n" for k, n in enumerate(numbers)
    )


TRAINER = [
    ("steps of all", trainer([10, 20, 30], ", 'global_step/max_steps': '{n}/1024'"), [10, 20, 30]),
    ("epochs alone", COUNTS + trainer([10, 20, 30, 40, 50]), [None] * 5),
    ("argument", "+ python train.py --logging_steps 20\n" + trainer([20, 40, 60]), [20, 40, 60]),
    (
        "resumed",
        "+ python train.py --logging_steps 20 --resume_from_checkpoint a\n" + trainer([520, 540]),
        [None, None],
    ),
    ("bars later", trainer([10]) + "".join(f"{n}/90 [00:{n}<01:10]" + trainer([n]) for n in (20, 30)), [10, 20, 30]),
    ("nothing", trainer([10, 20, 30]), [None, None, None]),
]


@pytest.mark.parametrize(("text", "numbers"), [case[1:] for case in TRAINER], ids=[case[0] for case in TRAINER])
def test_a_trainers_losses_have_the_steps_that_the_log_shows_or_none(tmp_path, text, numbers):
    (log,) = runs(tmp_path, text)
    found = [None if n != n else n for n in log.iterations["iteration"]]
    assert found == numbers
    assert any("does not number" in note for note in log.notes) == (None in numbers)


def test_seconds_are_of_the_runtime_and_the_steps_not_of_a_rounded_rate(tmp_path):
    """The Trainer rounds its rate to 0.001: 1024 steps of 136.5 s come out as 0.007 steps per second, or 142.9 s."""
    end = "{'train_runtime': 139776.0, 'train_steps_per_second': 0.007}\n"
    (log,) = runs(tmp_path, TRAINER[0][1] + end)
    assert measure_log(log).sec_per_it == 136.5
    (log,) = runs(tmp_path, TRAINER[-1][1] + end)
    assert measure_log(log).sec_per_it != measure_log(log).sec_per_it, "two digits are no measurement"


PREFIXES = [
    "[1745]",
    "[1745]: ",
    "jz-a100-3: ",
    "r6i5n1: ",
    " 3: ",
    "[rank3]:",
    "[1,3]<stdout>:",
    "[pod/train-3/main] ",
]
PREFIXES += ["2026-01-01T10:00:00.123456789Z ", "2026-01-01 10:00:00,123 - INFO - ", "INFO:root:"]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_what_stands_before_a_line_takes_nothing_from_it(tmp_path, prefix):
    timers = "(min, max) time across ranks (ms):\n    optimizer .......................: (10.00, 20.00)\n"
    step = '{"iteration": %d, "sec_per_it": 0.5, "lm_loss": 2.5}\n'
    for text in (m2021(1) + timers + m2021(2), step % 1 + step % 2, TRAINER[0][1]):
        plain = runs(tmp_path, text)
        found = runs(tmp_path, "".join(prefix + line for line in text.splitlines(True)))
        assert len(found) == len(plain) == 1 and found[0].iterations.equals(plain[0].iterations)
        assert found[0].timers.equals(plain[0].timers)


def test_ranks_that_print_the_same_iterations_at_their_own_pace_are_one_run(tmp_path):
    lines = [
        (i + lag, m2021(i, 100, ms=2000.0 + rank, loss=5 - i / 100), rank)
        for rank, lag in ((0, 0), (1, 3), (2, 1))
        for i in range(1, 30)
    ]
    for prefix in ("{}: ", "jz-a100-{}: "):
        text = "".join(prefix.format(rank) + line for _, line, rank in sorted(lines, key=lambda entry: entry[0]))
        (log,) = runs(tmp_path, text)
        assert list(log.iterations["iteration"]) == list(range(1, 30))


def test_a_loss_without_a_name_before_it_is_the_loss(tmp_path):
    text = m2021(1).replace("lm loss", "loss") + m2021(2).replace("lm loss: 5", "loss: 7.5 | lm loss: 5")
    assert list(runs(tmp_path, text)[0].iterations["lm_loss"]) == [5, 5]


def test_lines_of_another_program_are_not_taken_for_megatrons(tmp_path):
    """NeMo 2 prints `iteration 5/99 |` with fields of its own."""
    line = "Training epoch 0, iteration {}/99 | lr: 1e-05 | global_step: 0 | our_timing in s: 6.4\n"
    (log,) = runs(tmp_path, line.format(0) + line.format(1))
    assert not log.dialect.startswith("megatron")


def test_tokens_per_second_follow_the_length_of_a_curriculum(tmp_path):
    arguments = "------ arguments ------\n  seq_length ... 2048\n  num_layers ... 8\n  hidden_size ... 512\n  num_attention_heads ... 8\n  padded_vocab_size ... 50304\n  world_size ... 8\n"
    line = FORK.replace("seqlen:  2048", "seqlen:    64").replace("10 |", "100 |")
    (log,) = runs(tmp_path, arguments + "".join(line.replace(" 4/", f" {i}/") for i in range(1, 30)))
    measured = measure_log(log)
    assert measured.tokens_per_s == 32 * 64 / 1.6 and measured.config.shape.seq_length == 64


START = "using world size: 8, data-parallel-size: 8\n"
FAILED = 'Traceback (most recent call last):\n  File "a.py", line 1\nValueError: no such index\n'
LAUNCHES = {
    "after one that completed": (
        START + m2021(10) + "[after training is done]\n" + START + FAILED,
        ["completed", "crashed"],
    ),
    "before one that trains": (START + FAILED + START + m2021(1) + m2021(10), ["crashed", "completed"]),
    "twice": (START + FAILED + START + FAILED, ["crashed", "crashed"]),
    "without a word": (START + m2021(10) + START + "loading\n", ["completed", "running"]),
}


@pytest.mark.parametrize(("text", "statuses"), LAUNCHES.values(), ids=LAUNCHES)
def test_a_launch_that_trains_nothing_is_a_run_of_its_own(tmp_path, text, statuses):
    assert [log.status for log in runs(tmp_path, text)] == statuses


@pytest.mark.parametrize("count", [2, 500])
def test_a_run_knows_its_lines_and_their_clock(count):
    """A line every 2 s from 1735689600, 2025-01-01 00:00:00 UTC, on line 3 of the file."""
    stamp = "[2025-01-01 00:{:02d}:{:02d}.500000]"
    text = "one\ntwo\n" + "".join(stamp.format(i // 30 % 60, i * 2 % 60) + m2021(i, 900) for i in range(1, count + 1))
    reader = Reader()
    reader.feed(text.encode())
    (run,) = reader.close()
    assert (run.first_number, run.last_number) == (3, count + 2)
    assert (run.clock[0], run.clock[-1]) == ((1, 1735689602.5), (count, 1735689600.5 + 2 * count))


def test_dates_of_other_orders_are_a_clock_too(tmp_path):
    text = "".join(f"01/31/2026 10:00:0{i} [Rank 0] step={i}, skipped=0, lr=[1e-05]\n" for i in (1, 2, 3))
    (tmp_path / "a.log").write_text(text)
    assert read_log(tmp_path / "a.log").iterations["sec_per_it"].tolist()[1:] == [1.0, 1.0]


@pytest.mark.parametrize("prefix", ["", "[rank3]:", "2026-01-01T10:00:00Z "])
def test_many_lines_and_one_at_a_time_are_read_alike(prefix):
    """Lines of one form are read by array operations where a block has several, else one by one."""
    lines = {
        "megatron": [m2021(i, 900, ms=2000 + i / 7, loss=5 / i) for i in range(1, 80)],
        "deepspeed alone": deepspeed(0).splitlines(True) + deepspeed(25, at=3).splitlines(True),
        "torchtitan": [TITAN.format(s=i % 60, m=i // 60, i=i, loss=5 / i, tps=7000 + i) for i in range(1, 80)],
        "every tenth step": [
            TITAN.format(s=i % 60, m=i // 60, i=10 * i, loss=5 / i, tps=7000 + i) for i in range(1, 80)
        ],
        "nanotron": [NANOTRON.format(i=i, r=0, loss=9 - i / 100).replace("/ 9 |", "/ 99 |") for i in range(1, 80)],
        "two runs": [m2021(i, 900) for part in (range(1, 40), range(20, 70)) for i in part],
    }
    lines["with a step"] = [
        text
        for i, line in enumerate(lines["megatron"])
        for text in (line, RESUMED.format(m=i // 60, s=i % 60, ms=0, i=i + 1, g=i + 1))
    ]
    for name, texts in lines.items():
        at_once, singly, texts = Reader(), Reader(), [(prefix + text).encode() for text in texts]
        at_once.feed(b"".join(texts))
        for text in texts:
            singly.feed(text)
        for one, other in zip(at_once.close(), singly.close(), strict=True):
            for table in ("iterations", "companion", "timers"):
                frames = [frame(getattr(run, table).columns()).sort_index(axis=1) for run in (one, other)]
                assert frames[0].equals(frames[1]), (name, table)
            assert (one.memory, one.last_number, one.clock[-1:]) == (other.memory, other.last_number, other.clock[-1:])


@pytest.mark.parametrize("code", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("count", [3, 9000])
def test_other_encodings_are_read_as_utf8(tmp_path, code, count):
    """PowerShell writes UTF-16, with a byte order mark or without; a large file is converted in parts."""
    text = "é\n" + "".join(m2021(i, 9999, ms=2000 + i) for i in range(1, count + 1))
    (tmp_path / "a.log").write_bytes(text.encode(code))
    table = read_log(tmp_path / "a.log").iterations
    assert list(table["sec_per_it"]) == [(2000 + i) / 1e3 for i in range(1, count + 1)]


def test_a_file_that_grows_is_read_as_far_as_it_goes_and_one_that_shrinks_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("trilane.logs.reading.blocks.BLOCK", 1000)
    path, line = tmp_path / "a.log", m2021(1)
    path.write_text("".join(m2021(i, 99) for i in range(1, 20)))
    read = blocks(path)
    next(read)
    with path.open("a") as file:
        file.write(m2021(20, 99) + m2021(21, 99)[:100])
    assert b"".join(read).count(b"elapsed time") == 21 - next(blocks(path)).count(b"elapsed time")
    read = blocks(path)
    next(read)
    path.write_text(line)
    with pytest.raises(ValueError, match=r"^log=.*a.log: became shorter while it was read"):
        list(read)
    read = blocks(path)
    next(read)
    (tmp_path / "b.log").write_text("")
    (tmp_path / "b.log").rename(path)
    assert list(read) == [], "a file put in its place does not change the one that is read"


def test_bars_drawn_with_escape_sequences_hide_no_line(tmp_path):
    drawn = "\x1b[A\x1b[2K\r 10%|#  | {i}/90 [00:{i:02d}<01:00,  1.00s/it]\x1b[0m\n\x1b[1m{line}\x1b[0m"
    text = "".join(drawn.format(i=i, line=m2021(i).rstrip("\n")) + "\n" for i in range(1, 9))
    assert list(runs(tmp_path, text)[0].iterations["iteration"]) == list(range(1, 9))


def test_digits_that_decide_what_a_line_is_make_no_form(tmp_path, monkeypatch):
    monkeypatch.setenv(tables.VARIABLE, "")
    table = {"name": "phases", "iteration": ["phase 1 update (?P<iteration>\\d+) took (?P<sec_per_it>\\d+)"]}
    (tmp_path / "own.json").write_text(json.dumps(table))
    tables.use([tmp_path / "own.json"])
    (log,) = runs(tmp_path, "".join(f"phase {i % 7} update {100 + i} took {i % 9}\n" for i in range(1, 71)))
    assert list(log.iterations["iteration"]) == list(range(101, 171, 7))


def test_the_same_iteration_with_another_loss_is_another_run(tmp_path):
    assert len(runs(tmp_path, "0: " + m2021(5) + "0: " + m2021(5, loss=4.5))) == 2
