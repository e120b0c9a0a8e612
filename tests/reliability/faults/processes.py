"""Faults of ranks, of where they meet, and of processes that are told to end."""

import socket
from pathlib import Path
from typing import Any

from tests.reliability.faults import SAVING, Fault
from tests.reliability.faults.config import flags
from tests.reliability.faults.data import other_tokenizer

_BROKEN = "--experimental.custom_import=tests.reliability.broken"
PORT, PORT_IN_USE = 29_411, 29_412


def rank_of_two(**others: str) -> dict[str, str | None]:
    """The environment of one rank whose peer is not there."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(PORT)}
    return {"WORLD_SIZE": "2"} | where | others


_taken: list[socket.socket] = []


def at_port_in_use(rank: str) -> Fault:
    def arrange(folder: Path) -> list[str]:
        if not _taken:
            _taken.append(socket.create_server(("", PORT_IN_USE)))
        return ["--comm.init_timeout_seconds=1"]

    return Fault(arrange, environment=rank_of_two(RANK=rank, MASTER_PORT=str(PORT_IN_USE)))


_own_files: list[str] = []


def with_own_files_on_rank_1(folder: Path) -> list[str]:
    (folder / "short.jsonl").write_text('{"text": "a text"}\n' * 3)
    _own_files[:] = [
        f"--training.dataset_path={folder}/short.jsonl",
        f"--model.hf_assets_path={other_tokenizer(folder)}",
    ]
    return []


def one_step_is_whole(folder: Path) -> None:
    (step,) = (folder / "outputs/checkpoint").glob("step-*")
    assert (step / ".metadata").exists() and (step / ".xxh128sums").exists()
    assert not (step / ".incomplete").exists()


LONG = ["--training.steps=1000"]
LONG_SAVING = [*SAVING, "--checkpoint.interval=1000", *LONG]


def alone(*arguments: str, **environment: str) -> Fault:
    """One rank whose peer is not there."""
    return Fault(flags(*arguments), environment=rank_of_two(**environment))


def broken(what: str, *arguments: str, rank: int = 0, step: int | None = 2, **more: Any) -> Fault:
    """A job in which this goes wrong on a rank, after a step or on import."""
    environment = {"BROKEN": what, "BROKEN_RANK": str(rank)} | more.pop("environment", {})
    environment["BROKEN_STEP"] = None if step is None else str(step)
    return Fault(flags(_BROKEN, *arguments), environment=environment, **more)


FAULTS = {
    "rank number beyond the number of ranks": alone(RANK="5"),
    "local rank beyond the processes of the machine": alone(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="3", LOCAL_WORLD_SIZE="1"
    ),
    "half of torchrun's environment": Fault(flags(), environment={"RANK": "0", "WORLD_SIZE": "2"}),
    "port in use": at_port_in_use("0"),
    "port that another program has, and does not answer at": at_port_in_use("1"),
    "wrong master address": alone(
        "--comm.init_timeout_seconds=2", RANK="1", MASTER_ADDR="nowhere.invalid"
    ),
    "rank that is not there": alone("--comm.init_timeout_seconds=2", RANK="0"),
    "unknown key on one rank": Fault(
        flags(), ranks=2, arguments_of_rank={1: ["--training.stepz=3"]}
    ),
    "ranks with different settings": Fault(
        flags(),
        ranks=2,
        arguments_of_rank={1: ["--optimizer.lr=0.01", "--model.flavor=debugmodel_flex_attn"]},
    ),
    "tokenizer and data that differ on one rank": Fault(
        with_own_files_on_rank_1, ranks=2, arguments_of_rank={1: _own_files}
    ),
    "module to import that raises": broken("raise", step=None),
    "code that ends the process during training": broken("exit", absent=("training completed",)),
    "out of memory": broken("out of memory"),
    "data worker that is killed": broken(
        "kill data worker", "--training.dataloader.num_workers=1", *LONG
    ),
    "rank that is killed": broken("SIGKILL", *LONG, rank=1, ranks=2),
    "rank that fails": broken("fail to read", *LONG, rank=1, ranks=2),
    "rank that hangs": broken("hang", *LONG, "--comm.train_timeout_seconds=3", rank=1, ranks=2),
    "step that waits for one rank": broken(
        "hang 3", "--training.steps=40", rank=1, step=7, ranks=2
    ),
    "SIGTERM to one rank before it trains": broken("SIGTERM", rank=1, step=None, ranks=2),
    "SIGTERM to one rank": broken(
        "SIGTERM", *LONG_SAVING, rank=1, ranks=2, check=one_step_is_whole
    ),
    "Ctrl-C": broken("SIGINT", *LONG_SAVING, check=one_step_is_whole),
    "second signal while a run is ending": broken(
        "SIGTERM", *LONG_SAVING, environment={"BROKEN_TIMES": "2"}
    ),
    "SIGTERM without checkpoints": broken("SIGTERM", *LONG),
    "Ctrl-C without checkpoints": broken("SIGINT", *LONG),
    "time limit that comes near": Fault(
        flags(*LONG_SAVING, "--training.time_limit_minutes=0.02", "--metrics.log_freq=10"),
        check=one_step_is_whole,
    ),
}
