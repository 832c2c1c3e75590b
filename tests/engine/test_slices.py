"""Files of slices: the published format, on the disk once closed, and a full disk that is reported
and not raised.
"""

import os

from support import Later

torch, files = Later("torch"), Later("trilane_engine.checkpoint.slices")


def test_a_file_has_the_published_format_and_was_synchronised(tmp_path, monkeypatch):
    """By huggingface/safetensors. fsync(2): without it, a crash after the save may leave a
    complete-looking checkpoint of zeros; there a network file system reports a full disk.
    """
    from safetensors.torch import load_file

    sizes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda handle: sizes.append(os.fstat(handle).st_size))
    entries = [("weight", (3,)), ("exp_avg", (2,))]
    values = torch.arange(5.0)
    _, (size, _) = files.write_slices(tmp_path / "file", entries, values.split([3, 2]))
    assert sizes == [size] == [(tmp_path / "file").stat().st_size]
    assert torch.equal(torch.cat([*load_file(tmp_path / "file").values()]).sort()[0], values)
