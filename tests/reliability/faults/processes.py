"""Faults of ranks, of where they meet, and of processes that are told to end."""

import json
import shutil
import socket
from pathlib import Path
from typing import Any

from tests.reliability import jobs
from tests.reliability.faults import SAVING, Fault

_BROKEN = "--experimental.custom_import=tests.reliability.broken"
_PORT = 29_411


def flags(*arguments: str):
    return lambda folder: arguments


def rank_of_two(**others: str) -> dict[str, str | None]:
    """The environment of one rank whose peer is not there."""
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(_PORT)}
    return {"WORLD_SIZE": "2"} | where | others


_taken: list[socket.socket] = []


def with_port_in_use(folder: Path) -> list[str]:
    if not _taken:
        _taken.append(socket.create_server(("", _PORT + 1)))
    return ["--comm.init_timeout_seconds=1"]


_own_files: list[str] = []


def with_own_files_on_rank_1(folder: Path) -> list[str]:
    (folder / "short.jsonl").write_text('{"text": "a text"}\n' * 3)
    tokenizer = shutil.copytree(jobs.TOKENIZER, folder / "tokenizer")
    content = json.loads((tokenizer / "tokenizer.json").read_text())
    ids = content["model"]["vocab"]
    one, other = sorted(ids, key=ids.get)[1500:1502]
    ids[one], ids[other] = ids[other], ids[one]
    (tokenizer / "tokenizer.json").write_text(json.dumps(content))
    _own_files[:] = [
        f"--training.dataset_path={folder}/short.jsonl",
        f"--model.hf_assets_path={tokenizer}",
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
    environment |= {} if step is None else {"BROKEN_STEP": str(step)}
    return Fault(flags(_BROKEN, *arguments), environment=environment, **more)


FAULTS = {
    "rank number beyond the number of ranks": alone(RANK="5"),
    "local rank beyond the processes of the machine": alone(
        RANK="0", WORLD_SIZE="1", LOCAL_RANK="3", LOCAL_WORLD_SIZE="1"
    ),
    "half of torchrun's environment": Fault(flags(), environment={"RANK": "0", "WORLD_SIZE": "2"}),
    "port in use": Fault(
        with_port_in_use, environment=rank_of_two(RANK="0", MASTER_PORT=str(_PORT + 1))
    ),
    "port that another program has, and does not answer at": Fault(
        with_port_in_use, environment=rank_of_two(RANK="1", MASTER_PORT=str(_PORT + 1))
    ),
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
