"""Checkpoints of sharded models on gloo ranks."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from tests.unit.checkpoint import runs
from tests.unit.checkpoint.runs import assert_same
from torchtitan.checkpoint import folder as ranks_folder
from torchtitan.checkpoint import hf, hf_assets
from torchtitan.checkpoint.folder import HASHES_FILE, find_damage, mark_unfinished
from torchtitan.distributed.processes import ranks
from torchtitan.distributed.processes.ranks import from_rank_zero
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools import storage


class Position(Stateful):
    """Stands in for a dataloader. Each rank saves its position, and gets all on another rank count."""

    def __init__(self) -> None:
        self.loaded: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        own = {f"dp_rank_{dist.get_rank()}": bytes([dist.get_rank()])}
        return own | {"world_size": dist.get_world_size()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.loaded = dict(state_dict)


class NetAdapter(StateDictAdapter):
    def to_hf(self, state_dict):
        return {f"model.{name}": tensor for name, tensor in state_dict.items()}

    def from_hf(self, hf_state_dict):
        return {name.removeprefix("model."): tensor for name, tensor in hf_state_dict.items()}


class Run(runs.Run):
    """A sharded model with optimizer and checkpoint manager. The same seed on every rank."""

    def __init__(self, dump_folder: str, seed: int = 0, **config: Any) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
        for layer in model:
            # Stays gathered after a forward pass without backward, like a decoder's last layer.
            fully_shard(layer, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh)
        super().__init__(dump_folder, model, Position(), NetAdapter(None, None), **config)

    def everything(self) -> dict[str, Any]:
        return {name: whole(value) for name, value in super().everything().items()}


def whole(value: Any) -> Any:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value


def save_every_second_step(folder: str) -> list[dict[str, Any]]:
    run = Run(folder, async_mode="async", interval=2)
    saved = []
    for step in range(1, 5):
        run.train()
        with torch.no_grad():
            run.model(torch.ones(1, 4))  # leaves the last layers gathered
        run.manager.save(step)
        saved.append(run.everything())
    run.train()  # must not change the copies that are being written
    run.manager.close()
    return saved


def load_step(folder: str, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
    run = Run(folder, seed=1)
    assert run.manager.load(step)
    return run.everything(), run.dataloader.loaded


def test_async_saves_from_kept_memory_hold_each_its_own_step_for_two_ranks_and_one(tmp_path):
    saved, _ = run_ranks(save_every_second_step, 2, str(tmp_path))
    for step in (2, 4):
        for rank, (on_two, positions) in enumerate(run_ranks(load_step, 2, str(tmp_path), step)):
            assert_same(saved[step - 1], on_two)
            assert positions == {f"dp_rank_{rank}": bytes([rank]), "world_size": 2}
    ((on_one, positions),) = run_ranks(load_step, 1, str(tmp_path), 4)
    assert_same(saved[-1], on_one)
    assert positions == {"dp_rank_0": b"\x00", "dp_rank_1": b"\x01", "world_size": 2}


def questions_of_a_load(folder: str) -> tuple[int, int]:
    """How often a load asked rank 0, and how often it gathered values of all ranks."""
    Run(folder).manager.save(1)
    with (
        mock.patch.object(
            ranks.dist, "broadcast_object_list", wraps=dist.broadcast_object_list
        ) as ask,
        mock.patch.object(ranks.dist, "all_gather_object", wraps=dist.all_gather_object) as gather,
    ):
        run = Run(folder, seed=1)
        with mock.patch.object(run.manager, "dcp_load"):  # DCP has collectives of its own
            assert run.manager.newest_step() == 1 and not run.manager.holds_weights_only(1)
            asked_before = ask.call_count
            assert run.manager.load()
    return ask.call_count - asked_before, gather.call_count


def test_a_load_asks_rank_zero_once(tmp_path):
    for asked, gathered in run_ranks(questions_of_a_load, 2, str(tmp_path)):
        # Gathered: the damage that each rank found, and the entries that each rank wants.
        assert (asked, gathered) == (1, 2)


def fall_back_twice(folder: str) -> list[int]:
    run = Run(folder, keep_latest_k=0)
    saved = {}
    for step in (1, 2, 3):
        run.train()
        saved[step] = run.everything()
        run.manager.save(step)

    def damage() -> None:
        checkpoint = Path(folder) / "checkpoint"
        mark_unfinished(str(checkpoint / "step-3"))
        data = checkpoint / "step-2" / "__1_0.distcp"
        data.write_bytes(data.read_bytes()[:-1])

    from_rank_zero(damage)
    assert run.manager.load()
    step_1 = Path(folder) / "checkpoint" / "step-1"
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):  # whichever rank reads it
        content = from_rank_zero((step_1 / name).read_bytes)
        from_rank_zero(lambda: (step_1 / name).write_bytes(content[:-1]))  # noqa: B023
        assert find_damage(str(step_1)).startswith(f"{name} does not have the content")
        from_rank_zero(lambda: (step_1 / name).write_bytes(content))  # noqa: B023
    return [
        step for step in saved if torch.equal(saved[step]["0.weight"], whole(run.model[0].weight))
    ]


def test_all_ranks_fall_back_to_the_same_step(tmp_path):
    assert run_ranks(fall_back_twice, 2, str(tmp_path)) == [[1], [1]]


def export_of_stages(folder: str) -> None:
    """Each rank holds other tensors, as stages of a pipeline do, and rank 0 writes both files."""
    rank = dist.get_rank()
    state = {f"{rank}.{i}": torch.full((3, i), 10.0 * rank + i) for i in range(3)}
    tied = {"tied": torch.ones(5)}
    state = tied | state if rank else state | tied  # the copies are in different parts
    adapter = NetAdapter(None, None)
    adapter.fqn_to_index_mapping = {"model.0.0": 1, "model.1.1": 2}
    with (
        mock.patch.dict("os.environ", LOCAL_WORLD_SIZE="1"),
        mock.patch.object(hf, "_BYTES_PER_PART", 1),
        mock.patch.object(ranks_folder, "hash_file", side_effect=AssertionError("read again")),
    ):
        hf.save_to_hf(state, adapter, folder, torch.bfloat16)
    assert find_damage(folder) is None


def test_a_file_gets_the_tensors_of_ranks_that_do_not_write_it(tmp_path):
    run_ranks(export_of_stages, 2, str(tmp_path))
    files = [load_file(file) for file in sorted(tmp_path.glob("*.safetensors"))]
    assert [len(tensors) for tensors in files] == [1, 6]
    expected = {
        f"model.{r}.{i}": torch.full((3, i), 10.0 * r + i) for r in (0, 1) for i in range(3)
    }
    expected["model.tied"] = torch.ones(5)
    assert_same({n: t.bfloat16() for n, t in expected.items()}, files[0] | files[1])


def upload_from_two_disks(folder: str) -> None:
    disk, bucket = f"{folder}/disk-{dist.get_rank()}", f"{folder}/bucket"
    os.environ["XDG_CACHE_HOME"] = f"{disk}/cache"
    run = Run(disk, async_mode="async", folder=f"file://{bucket}")
    run.train()
    run.manager.save(1)
    run.train()
    saved = run.everything()
    run.manager.save(2)
    run.manager.close()
    assert find_damage(f"file://{bucket}/step-2") is None
    own = Path(f"{disk}/checkpoint/step-2")
    assert own.exists() == (dist.get_rank() == 0)  # rank 1 sees no file of rank 0, and keeps none
    for verifies in (True, False):
        other = Run(disk, seed=1, folder=f"file://{bucket}", verify_on_load=verifies)
        assert other.manager.load()
        assert_same(other.everything(), saved)
    with contextlib.suppress(FileNotFoundError):
        Path(f"{bucket}/step-2/{HASHES_FILE}").unlink()  # as if the upload had been interrupted
    third = Run(disk, seed=2, folder=f"file://{bucket}")
    assert third.manager.load() and third.manager.newest_step() == 1
    if dist.get_rank() == 0:
        shutil.rmtree(f"{bucket}/step-2")
    third.manager.verify_on_load = False
    with pytest.raises(ValueError, match="1 of its 3 files are on no disk"):
        third.manager.load(step=2)
    run.manager.save_hf(f"file://{bucket}/hf")
    assert find_damage(f"file://{bucket}/hf") is None


def test_machines_without_a_shared_folder_meet_in_the_bucket(tmp_path):
    run_ranks(upload_from_two_disks, 2, str(tmp_path))


class VisionAdapter(NetAdapter):
    def ignores_hf_key(self, hf_key):
        return hf_key.startswith("vision.")

    holds_untrained_part = ignores_hf_key


def export_vision_of_a_base_in_a_bucket(folder: str) -> None:
    """A run that resumes. Rank 1 is on another machine, and has a cache of its own."""
    rank, disk = dist.get_rank(), f"{folder}/disk-{dist.get_rank()}"
    os.environ["XDG_CACHE_HOME"], os.environ["LOCAL_WORLD_SIZE"] = f"{disk}/cache", "1"
    base = dict(initial_load_path=f"file://{folder}/base", initial_load_in_hf=True)
    Run(folder).manager.save(1)
    run = Run(folder, seed=1, **base, untrained_weights="copy")
    run.manager.sd_adapter = VisionAdapter(None, None)
    assert run.manager.load()
    assert [*Path(f"{disk}/cache").rglob("fetched_*/a.safetensors")]  # while no rank waits
    only_rank_zero = mock.patch.object(hf_assets, "save_tensors", side_effect=AssertionError(rank))
    gone = mock.patch.object(storage, "find", side_effect=OSError("the store is gone"))
    with gone, only_rank_zero if rank else contextlib.nullcontext():
        run.manager.save_hf(f"{folder}/out")


def test_untrained_parts_of_a_base_in_a_bucket_are_copied_by_the_machine_that_exports(tmp_path):
    (tmp_path / "base").mkdir()
    vision = {f"vision.{n}": torch.full((3,), float(i)) for i, n in enumerate("ab")}
    for name, tensor in vision.items():
        save_file({name: tensor}, tmp_path / f"base/{name[-1]}.safetensors")
    run_ranks(export_vision_of_a_base_in_a_bucket, 2, str(tmp_path))
    files = [load_file(file) for file in (tmp_path / "out").glob("*untrained*")]
    assert_same(files[0] | files[1], vision)
