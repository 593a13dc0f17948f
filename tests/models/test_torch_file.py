"""Pickles of torch.save are read as tables: they call no function, and no number in them allocates memory."""

import io
import pickle
import struct
import tracemalloc
import zipfile
from collections import OrderedDict

import pytest
import torch

from specengine.models.torch_file import TorchFile


def saved(path, content):
    torch.save(content, path)
    return path


def rewritten(path, pickled=None, packing=zipfile.ZIP_STORED):
    """Writes the same zip file with another pickle or another compression."""
    out = io.BytesIO()
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(out, "w", packing) as new:
        for entry in old.infolist():
            content = pickled if pickled and entry.filename.endswith("data.pkl") else old.read(entry)
            new.writestr(entry.filename, content)
    path.write_bytes(out.getvalue())
    return path


@pytest.mark.parametrize(
    "dtype", ["float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"]
)
def test_tensors_of_every_type_are_read_by_rows(tmp_path, dtype):
    tensor = (torch.randn(9, 4) * 9).to(getattr(torch, dtype))
    file = TorchFile(saved(tmp_path / "file", {"w": tensor}))
    assert file.tensors["w"].dtype == dtype and file.tensors["w"].shape == (9, 4)
    assert torch.equal(file.rows("w", 2, 7), tensor[2:7]) and file.rows("w", 3, 3).shape == (0, 4)


def test_views_parameters_and_tied_weights_are_read_as_torch_does(tmp_path):
    base = torch.randn(8, 6)
    content = OrderedDict(turned=base.T, part=base[2:5, 1:3], tied=base, own=torch.nn.Parameter(torch.randn(3)))
    file = TorchFile(saved(tmp_path / "file", content))
    for name, tensor in content.items():
        assert torch.equal(file.rows(name, 0, len(tensor)), tensor), name
        assert torch.equal(file.rows(name, 1, 3), tensor[1:3]), name


class Call:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("function", [open, eval, exec, bytearray, torch.zeros, torch.FloatStorage, getattr])
def test_nothing_in_a_pickle_is_called(tmp_path, function):
    marker = tmp_path / "marker"
    arguments = {
        open: (str(marker), "w"),
        eval: (f"open({str(marker)!r}, 'w')",),
        exec: (f"open({str(marker)!r}, 'w')",),
    }
    asked = Call(function, *arguments.get(function, (1 << 40,)))
    path = rewritten(saved(tmp_path / "file", {"w": torch.ones(2)}), pickle.dumps({"w": asked}, protocol=2))
    with pytest.raises(ValueError, match=r"file: (refused|not an intact)"):
        TorchFile(path)
    assert not marker.exists()


@pytest.mark.parametrize(
    "pickled",
    [
        b"\x80\x05\x96" + struct.pack("<Q", 1 << 40) + b".",  # BYTEARRAY8
        b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40) + b".",  # BINBYTES8
        b"\x80\x02]r\xff\xff\xff\xff.",  # LONG_BINPUT: a memo of four billion places
        b"\x80\x02(" * 3 + b"t" * 3 + b".",
        b"\x80\x02cos\nsystem\n.",
        b"\x80\x02}q\x00K\x01.",
        b"",
    ],
)
def test_a_pickle_of_other_instructions_is_refused_in_little_memory(tmp_path, pickled):
    path = rewritten(saved(tmp_path / "file", {"w": torch.ones(2)}), pickled or b".")
    tracemalloc.start()
    with pytest.raises(ValueError, match="file: "):
        TorchFile(path)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_compressed_entries_are_refused(tmp_path):
    path = saved(tmp_path / "file", {"w": torch.zeros(100_000)})
    assert TorchFile(path).tensors
    with pytest.raises(ValueError, match=r"file: not an intact PyTorch zip file: it has no plain data\.pkl"):
        TorchFile(rewritten(path, packing=zipfile.ZIP_DEFLATED))


@pytest.mark.parametrize(
    "content",
    [
        {"w": torch.ones(1).expand(1 << 40)},
        {"w": torch.ones(1).expand(1000, 1000)},
        {f"w{i}": torch.ones(1000).expand(1, 1000) for i in range(1)}
        | {"x": torch.ones(4).as_strided((999, 4), (0, 1))},
    ],
)
def test_a_small_storage_makes_no_large_tensor(tmp_path, content):
    with pytest.raises(ValueError, match="its tensors are larger than the file"):
        TorchFile(saved(tmp_path / "file", content))


def test_a_storage_is_read_within_its_bounds(tmp_path):
    path = saved(tmp_path / "file", {"w": torch.ones(4, 4)})
    with zipfile.ZipFile(path) as archive:
        (index,) = (entry for entry in archive.namelist() if entry.endswith("data.pkl"))
        pickled = archive.read(index)
    assert pickled.count(b"K\x04K\x04\x86") == 1
    for shape in (b"K\x05K\x04\x86", b"K\xffK\xff\x86"):
        with pytest.raises(ValueError, match="tensor 'w' ends behind its storage"):
            TorchFile(rewritten(path, pickled.replace(b"K\x04K\x04\x86", shape)))
