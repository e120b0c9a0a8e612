"""A small model, its training run with a checkpoint manager, and damage to files."""

from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.stateful import Stateful

from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.config.job_config import Checkpoint
from torchtitan.optim.lr_scheduler import LRSchedulersContainer
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.protocols.state_dict_adapter import StateDictAdapter


class Counter(Stateful):
    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step = state_dict["step"]


class Positions(Stateful):
    """Stands in for the dataloader."""

    def state_dict(self) -> dict[str, Any]:
        return {"dp_rank_0": b"", "world_size": 1}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        assert state_dict == self.state_dict()


class Net(nn.Module):
    def __init__(self, width: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(i): nn.Linear(width, width) for i in range(layers)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            x = layer(x).tanh()
        return x


class NetAdapter(StateDictAdapter):
    """HF calls the layers `model.<i>`; `model.<i>.inv_freq` is dropped."""

    from_hf_map = {
        "model.{}.weight": "layers.{}.weight",
        "model.{}.bias": "layers.{}.bias",
        "model.{}.inv_freq": None,
    }

    def to_hf(self, state_dict):
        return {name.replace("layers.", "model."): t for name, t in state_dict.items()}

    def from_hf(self, hf_state_dict):
        return {name.replace("model.", "layers."): t for name, t in hf_state_dict.items()}


class Run:
    """One training run: a small model, its optimizer and its checkpoint manager.

    Without a dataloader every save is due.
    """

    def __init__(self, dump_folder, model=None, dataloader=None, adapter=None, seed=0, **config):
        torch.manual_seed(seed)
        self.model = Net() if model is None else model
        self.optimizers = OptimizersContainer([self.model], torch.optim.AdamW, {"lr": 0.1})
        self.schedulers = LRSchedulersContainer(self.optimizers, lambda step: 1 / (step + 1))
        self.counter = Counter()
        self.dataloader = dataloader
        settings = dict(enable=True, interval=1, keep_latest_k=2)
        self.manager = CheckpointManager(
            dataloader=dataloader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={"train_state": self.counter},
            checkpoint_config=Checkpoint(**(settings | config)),
            sd_adapter=adapter,
            base_folder=str(dump_folder),
        )

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.model(torch.full((1, 4), 0.5)).sum().backward()
            self.optimizers.step()
            self.optimizers.zero_grad()
            self.schedulers.step()
            self.counter.step += 1

    def save(self, *steps: int, trains: bool = False) -> None:
        """Save these steps, and wait until old ones are removed."""
        for step in steps:
            if trains:
                self.train()
            self.manager.save(step)
        self.manager.close()

    def train_and_save(self, *steps: int) -> None:
        self.save(*steps, trains=True)

    def everything(self) -> dict[str, Any]:
        state = dict(self.model.state_dict()) | self.optimizers.state_dict()
        state = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        return state | {"schedule": self.schedulers.state_dict(), "step": self.counter.step}


def resumed(*args, **config) -> Run:
    """Return a new run that has loaded a checkpoint."""
    run = Run(*args, **config)
    assert run.manager.load()
    return run


def assert_same(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        same = torch.equal(value, second[name]) if torch.is_tensor(value) else value == second[name]
        assert same, name


def assert_same_weights(first: Run, second: Run) -> None:
    assert_same(dict(first.model.state_dict()), dict(second.model.state_dict()))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-80])


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def steps_in(folder: Path) -> list[int]:
    """The steps in the checkpoint folder of the run in `folder`."""
    return sorted(int(p.name.removeprefix("step-")) for p in folder.glob("checkpoint/step-*"))


def saved_names(folder: Path, step: int) -> set[str]:
    path = folder / "checkpoint" / f"step-{step}"
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)
