"""A folder of checkpoints: only what is complete counts, and what is damaged is found."""

import os
from functools import partial
from pathlib import Path

import pytest

from trilane.workspace import checkpoints


def made(folder: Path, iteration: int) -> Path:
    """A complete checkpoint."""
    aside = folder / f".{checkpoints.name_of(iteration)}.x"
    aside.mkdir(parents=True)
    (aside / "a").write_bytes(b"tensor")
    files = {"a": [6, checkpoints.digest(aside / "a")]}
    checkpoints.write_manifest(aside, {"files": files})
    checkpoints.publish(aside, folder / checkpoints.name_of(iteration))
    return folder / checkpoints.name_of(iteration)


def test_the_last_ones_are_kept(tmp_path):
    """As text, iter_10000000 would stand before iter_9999999, and be the one that is deleted."""
    for iteration in (10, 9_999_999, 10_000_000):
        made(tmp_path, iteration)
    for count, left in ((0, 3), (3, 3), (2, 2)):
        checkpoints.keep_last(tmp_path, count)
        assert len(checkpoints.complete(tmp_path)) == left
    assert [p.name for p in checkpoints.complete(tmp_path)] == ["iter_9999999", "iter_10000000"]
    assert checkpoints.latest(tmp_path) == tmp_path / "iter_10000000"
    assert not checkpoints.leftovers(tmp_path)
    assert checkpoints.complete(tmp_path / "iter_9999999") == [tmp_path / "iter_9999999"]


def test_a_power_failure_finds_no_name_without_its_content(tmp_path, monkeypatch):
    """A file system may keep a rename and lose what was not synced before it (man 2 fsync: also the
    folder's entry).

    So what is renamed is on the disk before, and its new name before the next one is given.
    """
    sync, moves = os.fsync, {name: getattr(os, name) for name in ("replace", "rename")}
    on_disk: set[str] = set()
    names, named = [], set[str]()

    def fsync(handle: int) -> None:
        place = os.readlink(f"/proc/self/fd/{handle}")
        on_disk.add(place)
        named.discard(place)
        sync(handle)

    def move(name: str, old: Path, new: Path) -> None:
        assert str(old) in on_disk, f"{old.name} is not on the disk"
        assert not named, f"the name {names[-1]} is not"
        names.append(new.name)
        named.add(str(new.parent))
        moves[name](old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    for name in moves:
        monkeypatch.setattr(os, name, partial(move, name))
    made(tmp_path, 10)
    assert names == ["manifest.json", "iter_0000010"] and not named


def test_what_a_killed_save_leaves_is_no_checkpoint_and_a_second_save_replaces_the_first(
    tmp_path,
):
    """The iteration is trained a second time after an older checkpoint had to be used."""
    (tmp_path / ".iter_0000040.x").mkdir()
    assert checkpoints.complete(tmp_path) == [] and checkpoints.latest(tmp_path) is None
    assert len(checkpoints.leftovers(tmp_path)) == 1
    (made(tmp_path, 10) / "a").write_bytes(b"damaged")
    assert (made(tmp_path, 10) / "a").read_bytes() == b"tensor" and len(
        checkpoints.leftovers(tmp_path)
    ) == 1


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda path: path.write_bytes(b"tensoR"), "a is damaged (its checksum differs)"),
        (lambda path: path.unlink(), "a cannot be read (No such file or directory)"),
    ],
)
def test_a_damaged_file_is_found(change, problem: str, tmp_path):
    path = made(tmp_path, 10)
    [(name, (_, checksum))] = checkpoints.read_manifest(path)["files"].items()
    assert checkpoints.fault(path, name, checksum) is None
    change(path / "a")
    assert checkpoints.fault(path, name, checksum) == problem


@pytest.mark.parametrize("damage", ['{"blake2b": "0", "content": {}}', "truncated"])
def test_a_damaged_manifest_is_found(damage: str, tmp_path):
    path = made(tmp_path, 10) / "manifest.json"
    path.write_text(path.read_text()[:50] if damage == "truncated" else damage)
    with pytest.raises(ValueError, match=r"manifest\.json is missing or damaged"):
        checkpoints.read_manifest(path.parent)
    path.unlink()
    with pytest.raises(ValueError, match=r"manifest\.json is missing or damaged"):
        checkpoints.read_manifest(path.parent)


@pytest.mark.parametrize(
    "place",
    [
        {"at": {"weight": 1 << 62}},
        {"file": "b"},
        {"box": [(0, 3)]},
        {"identity": None},
    ],
    ids=str,
)
def test_a_manifest_whose_slices_lie_outside_their_file_or_tensor_is_damaged(place: dict, tmp_path):
    """Whoever writes one can seal it, too: nothing is read by it."""
    piece = {"box": [(0, 2)], "file": "a", "at": dict.fromkeys(checkpoints.KINDS, 0)}
    for change in ({}, place):
        slices = [{**piece, **change, "at": {**piece["at"], **change.get("at", {})}}]
        content: dict = {"files": {"a": [8, "0"]}, "consumed_samples": 0}
        content["tensors"] = {"w": {"shape": [2], "slices": slices}}
        if "identity" not in change:
            content["identity"] = {"shape": {}}
        checkpoints.write_manifest(tmp_path, content)
        if not change:
            checkpoints.read_manifest(tmp_path)
    with pytest.raises(ValueError, match="damaged"):
        checkpoints.read_manifest(tmp_path)
