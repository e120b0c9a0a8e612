"""Checkpoints and weights from elsewhere: read as data, within their folder, or refused."""

import io
import json
import math
import os
import pickle
import random
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

from tests import hostile
from torchtitan.checkpoint import dcp
from torchtitan.checkpoint.hf import check_files
from torchtitan.checkpoint.states import saved_shapes_in
from torchtitan.engine import TrainingEngine
from torchtitan.protocols.state_dict_adapter import read_weight_map
from torchtitan.tools.unpickling import read_pickle

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def contents():
    return {
        "weight": torch.arange(6.0).reshape(2, 3),
        "half": torch.ones(4, dtype=torch.bfloat16),
        "eight": torch.ones(4).to(torch.float8_e4m3fn),
        "count": torch.tensor(3, dtype=torch.int64),
        "complex": torch.ones(2, dtype=torch.complex64),
        "state": {
            "lr": 1e-3,
            "betas": (0.9, 0.95),
            "names": ["a", "b"],
            "none": None,
            "flag": True,
            "blob": b"bytes",
            "set": {1, 2},
            "ordered": OrderedDict(a=1),
            "size": torch.Size([2, 3]),
            "dtype": torch.bfloat16,
            "nested": [{"deep": [torch.arange(2)]}],
        },
    }


def emptied(value):
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)((key, emptied(entry)) for key, entry in value.items())
    return [emptied(entry) for entry in value] if isinstance(value, list) else None


def same(a, b):
    if isinstance(a, torch.Tensor):
        bits = [tensor.reshape(-1).view(torch.uint8) for tensor in (a, b)]
        return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(*bits)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


@pytest.fixture
def folder(tmp_path):
    torch_dcp.save(contents(), checkpoint_id=tmp_path / "step-1")
    return tmp_path / "step-1"


def test_what_torch_saves_is_read_as_torch_reads_it(folder):
    ours, theirs = emptied(contents()), emptied(contents())
    dcp.load(ours, checkpoint_id=str(folder))
    torch_dcp.load(theirs, checkpoint_id=folder)
    assert same(ours, theirs) and same(ours, contents())


@pytest.mark.parametrize("name", sorted(hostile.PICKLES))
@pytest.mark.parametrize("read", [saved_shapes_in, lambda f: dcp.load({}, checkpoint_id=f)])
def test_metadata_executes_nothing(tmp_path, folder, name, read):
    (folder / ".metadata").write_bytes(hostile.PICKLES[name](tmp_path / "canary"))
    with pytest.raises(ValueError, match=r"step-1/\.metadata cannot be read: it names "):
        read(str(folder))
    assert not (tmp_path / "canary").exists()


@pytest.mark.parametrize("name", ["state.lr", "weight"])
def test_entry_executes_nothing(tmp_path, folder, name):
    hostile.plant_in_entry(folder, tmp_path / "canary", name)
    with pytest.raises(dcp.CheckpointException) as raised:
        dcp.load(emptied(contents()), checkpoint_id=str(folder))
    ((error, _),) = raised.value.failures.values()
    assert type(error) is ValueError
    assert "__0_0.distcp cannot be read: " in str(error) and "it names posix.mkdir" in str(error)
    assert not (tmp_path / "canary").exists()


def test_metadata_cannot_change_the_classes_that_it_names():
    # BUILD with a pair sets the attributes of the second, here of the class itself.
    by_class = b"\x80\x04ctorch.distributed.checkpoint.metadata\nMetadata\nN}Vseen\nI1\ns\x86b."
    pickle.loads(by_class)
    assert Metadata.seen
    del Metadata.seen
    read_pickle(io.BytesIO(by_class), dcp.METADATA_NAMES, "it")
    assert not hasattr(Metadata, "seen")


def test_enum_of_older_pythons_is_read_and_no_other_attribute():
    module = "torch.distributed.checkpoint.metadata"
    begin = f"cbuiltins\ngetattr\n(c{module}\n"
    encoded = f"{begin}_MEM_FORMAT_ENCODING\nVTORCH_CONTIGUOUS_FORMAT\ntR.".encode()
    kind = read_pickle(io.BytesIO(encoded), dcp.METADATA_NAMES, "it")
    assert kind.name == "TORCH_CONTIGUOUS_FORMAT"
    with pytest.raises(ValueError, match="it cannot be read"):
        encoded = f"{begin}Metadata\nV__init__\ntR.".encode()
        read_pickle(io.BytesIO(encoded), dcp.METADATA_NAMES, "it")


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/hostname", "sub/../../secret", "__0_0.distcp/../../secret"]
)
def test_checkpoint_reads_no_file_elsewhere(tmp_path, folder, name):
    (tmp_path / "secret").write_bytes((folder / "__0_0.distcp").read_bytes())
    hostile.redirect_files(folder, name)
    with pytest.raises(dcp.CheckpointException, match="leads out of the folder"):
        dcp.load(emptied(contents()), checkpoint_id=str(folder))


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize("seed", range(60))
def test_damage_anywhere_is_one_value_error_or_none(folder, file, seed):
    damage(folder / file, random.Random(seed))
    try:
        dcp.load(emptied(contents()), checkpoint_id=str(folder))
    except ValueError as error:
        assert str(folder) in str(error) and "\n" not in str(error)
    except dcp.CheckpointException as error:
        for reason, _ in error.failures.values():
            # Valid metadata may belong to another checkpoint.
            assert type(reason) is ValueError or file == ".metadata"


def damage(path, draw):
    data = bytearray(path.read_bytes())
    kind = draw.choice(["cut", "flip", "zero", "insert"])
    at = draw.randrange(len(data))
    if kind == "cut":
        del data[at:]
    elif kind == "flip":
        for _ in range(draw.choice([1, 20])):
            data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    elif kind == "zero":
        data[at : at + 200] = bytes(len(data[at : at + 200]))
    else:
        data[at:at] = draw.randbytes(50)
    path.write_bytes(bytes(data))


def test_whole_numbers_are_no_weights(folder):
    other = emptied(contents()) | {"count": torch.tensor(0.0)}
    refusal = "count is saved as torch.int64, but the model has torch.f"
    with pytest.raises(dcp.CheckpointException, match=refusal):
        dcp.load(other, checkpoint_id=str(folder))
    half = emptied(contents()) | {"weight": torch.zeros(2, 3, dtype=torch.bfloat16)}
    dcp.load(half, checkpoint_id=str(folder))
    assert half["weight"].tolist() == [[0, 1, 2], [3, 4, 5]]


# Chunks (offsets, sizes) that do not cover a tensor [2, 3] once.
HOLES = {
    "nothing": [],
    "half": [([1, 0], [1, 3])],
    "a corner less": [([0, 0], [1, 3]), ([1, 0], [1, 2])],
    "twice": [([0, 0], [2, 3]), ([0, 0], [2, 3])],
    "half of it twice": [([0, 0], [2, 2]), ([0, 1], [1, 1])],
    "beyond the end": [([0, 0], [1, 3]), ([1, 0], [2, 3])],
    "before the beginning": [([-1, 0], [2, 3]), ([1, 0], [1, 3])],
    "moved as a whole": [([-1, 0], [2, 3])],
    "other dimensions": [([0], [6])],
}


@pytest.mark.parametrize("name", HOLES)
def test_checkpoint_that_does_not_cover_a_tensor_is_refused(folder, name):
    hostile.change_chunks(folder, "weight", *HOLES[name])
    message = r"step-1/\.metadata is damaged: its \d chunks of weight do"
    with pytest.raises(ValueError, match=message):
        saved_shapes_in(str(folder))
    wanted = emptied(contents())
    with pytest.raises(ValueError, match="chunks of weight do not cover every element"):
        dcp.load(wanted, checkpoint_id=str(folder))
    assert same(wanted, emptied(contents()))  # no byte was loaded


@pytest.mark.parametrize("name", ["weight", "state.lr"])
def test_entry_of_which_nobody_says_where_it_lies_is_named(folder, name):
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    metadata.storage_data = {k: v for k, v in metadata.storage_data.items() if k.fqn != name}
    hostile.write_metadata(folder, metadata)
    with pytest.raises(ValueError, match=f"has no file position for a chunk of {name}"):
        saved_shapes_in(str(folder))


def test_entry_that_a_stream_unpacks_is_refused(folder):
    metadata = torch_dcp.FileSystemReader(folder).read_metadata()
    next(iter(metadata.storage_data.values())).transform_descriptors = ("zstd",)
    hostile.write_metadata(folder, metadata)
    with pytest.raises(ValueError, match="is compressed, or has a negative"):
        saved_shapes_in(str(folder))


# Entries that unpack to more bytes than they have


class _Allocates:
    def __reduce__(self):
        return bytearray, (10**7,)


def saved(value):
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.lr", lambda: hostile.deflated(saved("a" * 10**6)), "entry of .* unpacks to 100"),
        ("weight", lambda: hostile.deflated(saved(torch.zeros(10**6))), "entry of .* unpacks to 4"),
        ("state.blob", lambda: saved(_Allocates()), "it names bytearray, which is not plain data"),
    ],
)
def test_entry_takes_no_more_memory_than_it_has_bytes(folder, name, content, message):
    torch.load(io.BytesIO(content()), weights_only=True)  # torch unpacks it
    hostile.replace_entry(folder, name, content())
    with pytest.raises(dcp.CheckpointException, match=message):
        dcp.load(emptied(contents()) | {"state": contents()["state"]}, checkpoint_id=str(folder))


@pytest.mark.parametrize("name", ["step", "ntokens_seen", "weights_version"])
@pytest.mark.parametrize("value", [-1, math.nan, 1e3, 2**63, "3"])
def test_counts_of_a_run_are_whole_numbers(name, value):
    counts = {"step": 3, "ntokens_seen": 96, "weights_version": 3} | {name: value}
    engine = SimpleNamespace()
    message = f"train_state.{name} of a checkpoint must be a whole number"
    with pytest.raises(ValueError, match=message):
        TrainingEngine.load_state_dict(engine, counts)
    assert name not in vars(engine)
    TrainingEngine.load_state_dict(engine, {"step": 3, "ntokens_seen": 96})
    assert engine.weights_version == 3


# Names and links


def hub_cache(tmp_path: Path) -> Path:
    """A snapshot folder of huggingface_hub with one safetensors file."""
    repository = tmp_path / "hub/models--a--b"
    snapshot = repository / "snapshots/0123"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    save_file({"a": torch.ones(2)}, repository / "blobs/abcd")
    (repository / "blobs/index").write_text('{"weight_map": {"a": "model.safetensors"}}')
    (snapshot / "model.safetensors").symlink_to("../../blobs/abcd")
    (snapshot / "model.safetensors.index.json").symlink_to("../../blobs/index")
    return snapshot


@pytest.mark.parametrize(
    "target", ["../../../elsewhere", "../../refs/main", "../../../models--c--d/blobs/abcd"]
)
def test_the_hubs_cache_is_read_through_links_that_do_not_leave_it(tmp_path, target):
    snapshot = hub_cache(tmp_path)
    check_files(str(snapshot))
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(target)
    with pytest.raises(ValueError, match="leads out of the folder"):
        check_files(str(snapshot))


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/b.safetensors", "..", "", "a\0b", None, 3, ["a"]]
)
def test_index_names_plain_files_only(tmp_path, name):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": {"t": name}}))
    with pytest.raises(ValueError, match="names a file that is not beside it, for t"):
        read_weight_map(str(path))


def test_header_is_read_within_bounds(tmp_path):
    """A header with a size above the file's, or above 100 MB, takes no memory."""
    for length in (2**63, 2**31, 200_000_000):
        file = tmp_path / "model.safetensors"
        file.write_bytes(length.to_bytes(8, "little") + b"{}")
        os.truncate(file, 10)
        with pytest.raises(ValueError, match=r"model\.safetensors is not a safetensors file"):
            check_files(str(tmp_path))
