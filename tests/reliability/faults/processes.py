"""Faults of ranks, of where they meet, and of processes that are told to end."""

import json
import shutil
import socket
from pathlib import Path

from tests.reliability import jobs
from tests.reliability.faults import SAVING, Fault

_BROKEN = "--experimental.custom_import=tests.reliability.broken"
_PORT = 29_411


def flags(*arguments: str):
    return lambda folder: arguments


def breaks(what: str, rank: int = 0, step: int | None = 2, **others: str) -> dict[str, str | None]:
    """The environment of a job in which this goes wrong."""
    own = {"BROKEN": what, "BROKEN_RANK": str(rank)} | others
    return own if step is None else own | {"BROKEN_STEP": str(step)}


def rank_of_two(rank: str, **others: str) -> dict[str, str | None]:
    """The environment of one rank whose peer is not there."""
    return {
        "RANK": rank,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(_PORT),
    } | others


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
    assert (step / ".metadata").exists() and (step / ".sha256sums").exists()
    assert not (step / ".incomplete").exists()


LONG_SAVING = [*SAVING, "--checkpoint.interval=1000", "--training.steps=1000"]

FAULTS = [
    Fault(
        name="rank number that is no number",
        message="config error: the environment variable RANK must be an integer from 0 up and "
        "below 2, got 'abc'; start with torchrun…",
        cause="A launch script sets RANK wrongly.",
        remedy="Start with torchrun, or number the processes from 0.",
        arrange=flags(),
        environment=rank_of_two("abc"),
    ),
    Fault(
        name="rank number beyond the number of ranks",
        message="config error: the environment variable RANK must be an integer from 0 up and "
        "below 2, got '5'…",
        cause="RANK counts from 1, or WORLD_SIZE is that of another job.",
        remedy="Number the processes from 0 to WORLD_SIZE - 1.",
        arrange=flags(),
        environment=rank_of_two("5"),
    ),
    Fault(
        name="local rank beyond the processes of the machine",
        message="config error: the environment variable LOCAL_RANK must be an integer from 0 up "
        "and below 1, got '3'…",
        cause="LOCAL_RANK holds the rank in the whole job.",
        remedy="Count LOCAL_RANK from 0 on each machine.",
        arrange=flags(),
        environment=rank_of_two("0", WORLD_SIZE="1", LOCAL_RANK="3", LOCAL_WORLD_SIZE="1"),
    ),
    Fault(
        name="port that is no port",
        message="config error: the environment variable MASTER_PORT must be an integer from 0 up "
        "and below 65536, got '99999'…",
        cause="A launch script derives MASTER_PORT from a job number without a limit.",
        remedy="Choose a free port between 1024 and 65535.",
        arrange=flags(),
        environment=rank_of_two("0", MASTER_PORT="99999"),
    ),
    Fault(
        name="half of torchrun's environment",
        message="error: the environment has RANK or WORLD_SIZE, but not MASTER_ADDR, MASTER_PORT; "
        "start with torchrun, set all of…",
        cause="A shell that was part of another job is used again.",
        remedy="Unset RANK and WORLD_SIZE to run as one process, or start with torchrun.",
        arrange=flags(),
        environment={"RANK": "0", "WORLD_SIZE": "2"},
        exit_code=1,
    ),
    Fault(
        name="port in use",
        message="error: rank 0 cannot listen for the other ranks at MASTER_ADDR = localhost, "
        "MASTER_PORT = 29412: the port is in use, perhaps by a job that has not ended; end it, or "
        "set another MASTER_PORT on all ranks",
        cause="Another job on this machine uses the port.",
        remedy="End that job, or set another MASTER_PORT on all ranks.",
        arrange=with_port_in_use,
        environment=rank_of_two("0", MASTER_PORT=str(_PORT + 1)),
        exit_code=1,
    ),
    Fault(
        name="port that another program has, and does not answer at",
        message="error: rank 1 did not meet the other ranks within 1 s (comm.init_timeout_seconds) at "
        "MASTER_ADDR = localhost, MASTER_PORT = 29412: a program listens there, but does not answer as "
        "rank 0 of a job does; check …",
        cause="Another program uses the port; rank 0 says so, too.",
        remedy="End that program, or set another MASTER_PORT on all ranks.",
        arrange=with_port_in_use,
        environment=rank_of_two("1", MASTER_PORT=str(_PORT + 1)),
        exit_code=1,
    ),
    Fault(
        name="wrong master address",
        message="error: rank 1 did not meet the other ranks within 2 s "
        "(comm.init_timeout_seconds) at MASTER_ADDR = nowhere.invalid, MASTER_PORT = 29411: nothing "
        "answers there (…); check the address…",
        cause="MASTER_ADDR does not name the machine of rank 0, rank 0 was not started, or a "
        "firewall is between.",
        remedy="Set MASTER_ADDR to the machine of rank 0, as the other machines call it.",
        arrange=flags("--comm.init_timeout_seconds=2"),
        environment=rank_of_two("1", MASTER_ADDR="nowhere.invalid"),
        exit_code=1,
    ),
    Fault(
        name="rank that is not there",
        message="error: rank 0 did not meet the other ranks within 2 s "
        "(comm.init_timeout_seconds) at MASTER_ADDR = localhost, MASTER_PORT = 29411: 1 of 2 ranks "
        "came; check …that all 2 ranks were started…",
        cause="A machine has not started its processes, or WORLD_SIZE counts too many.",
        remedy="Start the missing ranks; raise comm.init_timeout_seconds if machines start late.",
        arrange=flags("--comm.init_timeout_seconds=2"),
        environment=rank_of_two("0"),
        exit_code=1,
    ),
    Fault(
        name="unknown key on one rank",
        message="rank 1: config error: --training.stepz…is unknown, did you mean …",
        cause="The command differs between machines.",
        remedy="Start all ranks with the same command.",
        arrange=flags(),
        ranks=2,
        arguments_of_rank={1: ["--training.stepz=3"]},
    ),
    Fault(
        name="TOML that one rank lacks",
        message="rank 1: config error: job.config_file names a TOML file that has to exist, got "
        "'/missing.toml'…",
        cause="The file was not copied to every machine.",
        remedy="Put the file where all machines find it.",
        arrange=flags(),
        ranks=2,
        arguments_of_rank={1: ["--job.config_file=/missing.toml"]},
    ),
    Fault(
        name="ranks with different settings",
        message="config error: the ranks disagree: model.flavor is 'debugmodel' on rank 0 and "
        "'debugmodel_flex_attn' on rank 1; optimizer.lr is 0.0008 on rank 0 and 0.01 on rank 1. "
        "Start all ranks with the same config, files and version",
        cause="The command or the TOML file differs between machines.",
        remedy="Start all ranks with the same config. Names and paths may differ.",
        arrange=flags(),
        ranks=2,
        arguments_of_rank={1: ["--optimizer.lr=0.01", "--model.flavor=debugmodel_flex_attn"]},
    ),
    Fault(
        name="tokenizer and data that differ on one rank",
        message="config error: the ranks disagree: content of model.hf_assets_path is '…' on rank 0 and '…' "
        "on rank 1; content of training.dataset_path is '…' on rank 0 and '…' on rank 1; number of documents "
        "is 2000 on rank 0 and 3 on rank 1. Start all ranks with the same config, files and version",
        cause="A machine has another state of the files.",
        remedy="Copy the files again.",
        arrange=with_own_files_on_rank_1,
        ranks=2,
        arguments_of_rank={1: _own_files},
    ),
    Fault(
        name="module to import that raises",
        message="config error: experimental.custom_import names a module to import, and "
        "'tests.reliability.broken' fails at …broken.py, line …: RuntimeError: no licence…",
        cause="The module has a bug, or needs something that is missing here.",
        remedy="Correct the module at that line.",
        arrange=flags(_BROKEN),
        environment=breaks("raise", step=None),
    ),
    Fault(
        name="module to import that ends the process",
        message="config error: experimental.custom_import names a module to import, and "
        "'tests.reliability.broken' fails at …broken.py, line …: SystemExit: 0…",
        cause="The module is a script that calls sys.exit.",
        remedy="Call sys.exit only under `if __name__ == '__main__':`.",
        arrange=flags(_BROKEN),
        environment=breaks("exit", step=None),
    ),
    Fault(
        name="config module that raises",
        message="config error: job.custom_config_module names a module to import, and "
        "'tests.reliability.broken' fails at …broken.py, line …: RuntimeError: no licence…",
        cause="The module has a bug, or needs something that is missing here.",
        remedy="Correct the module at that line.",
        arrange=flags("--job.custom_config_module=tests.reliability.broken"),
        environment=breaks("raise", step=None),
    ),
    Fault(
        name="code that ends the process during training",
        message="error: sys.exit(0) was called during the run, at …broken.py, line …",
        cause="A dataset, a reward function or another module of one's own calls sys.exit.",
        remedy="Raise an error instead.",
        arrange=flags(_BROKEN),
        environment=breaks("exit"),
        exit_code=1,
        absent=("training completed",),
    ),
    Fault(
        name="batch that no device can hold",
        message="error: training.local_batch_size = 10000000 rows of training.seq_len = 2048 cannot "
        "fit: one hidden state of the model takes 610 GiB, and the device has …",
        cause="The batch of one rank is counted in rows, not in tokens.",
        remedy="Lower training.local_batch_size; set training.global_batch_size for a large batch.",
        arrange=flags("--training.local_batch_size=10000000", "--training.seq_len=2048"),
    ),
    Fault(
        name="out of memory",
        message="error: out of memory, 2.00 GiB more were requested, with "
        "training.local_batch_size = "
        "1, training.seq_len = 32, activation_checkpoint.mode = 'none'; lower local_batch_size…",
        cause="Activations, states and temporary tensors do not fit on the device.",
        remedy="Lower local_batch_size, recompute activations, or shard over more ranks.",
        arrange=flags(_BROKEN),
        environment=breaks("out of memory"),
        exit_code=1,
    ),
    Fault(
        name="data worker that is killed",
        message="error: a data worker was killed, most often for lack of host memory; lower "
        "training.dataloader.num_workers (now 1), or look at the kernel's log (…)",
        cause="The kernel ends processes when host memory runs out.",
        remedy="Use fewer data workers, or more memory.",
        arrange=flags(_BROKEN, "--training.dataloader.num_workers=1", "--training.steps=1000"),
        environment=breaks("kill data worker"),
        exit_code=1,
    ),
    Fault(
        name="rank that is killed",
        message="error: rank 0 ends because rank 1 ended without a message; if its output has no "
        "error either, it was killed: look for the kernel's out-of-memory killer on its node",
        cause="The kernel, an administrator or a lost machine.",
        remedy="Start the job again: it goes on from its newest checkpoint. torchrun "
        "--max-restarts does so by itself.",
        arrange=flags(_BROKEN, "--training.steps=1000"),
        environment=breaks("SIGKILL", rank=1),
        ranks=2,
        exit_code=(1, -9),
    ),
    Fault(
        name="rank that fails",
        message="error: rank 0 ends because rank 1 failed: the disk is gone …error: the disk is gone "
        "(TORCHTITAN_TRACEBACK=1 shows the stack)",
        cause="One rank has an error, so the remaining ranks cannot go on.",
        remedy="Correct what that rank's message names.",
        arrange=flags(_BROKEN, "--training.steps=1000"),
        environment=breaks("fail to read", rank=1),
        ranks=2,
        exit_code=1,
    ),
    Fault(
        name="rank that hangs",
        message="error: another rank did not take part in a collective in time "
        "(comm.init_timeout_seconds up to the first step, comm.train_timeout_seconds after it): it "
        "hangs or is slow; look at the other ranks' output. …rank 1 ends because rank 0 failed: "
        "another rank did not…",
        cause="A file system or a device does not answer, or one rank has far more work.",
        remedy="Look at the rank that did not give up first; raise comm.train_timeout_seconds if "
        "it is only slow.",
        arrange=flags(_BROKEN, "--training.steps=1000", "--comm.train_timeout_seconds=3"),
        environment=breaks("hang", rank=1),
        ranks=2,
        exit_code=1,
    ),
    Fault(
        name="SIGTERM to one rank before it trains",
        message="error: rank 0 ends because rank 1 failed: SIGTERM: the run ends; what was not saved "
        "is lost",
        cause="A scheduler or an administrator ends the job while it starts.",
        remedy="Start the same command again.",
        arrange=flags(_BROKEN),
        environment=breaks("SIGTERM", rank=1, step=None),
        ranks=2,
        exit_code=(1, 143),
    ),
    Fault(
        name="SIGTERM to one rank",
        message="stopped after step 3 of 1000: SIGTERM came to rank 1; its checkpoint is whole, and "
        "the same command goes on",
        cause="A scheduler or an administrator ends the job.",
        remedy="Start the same command again.",
        arrange=flags(_BROKEN, *LONG_SAVING),
        environment=breaks("SIGTERM", rank=1),
        ranks=2,
        exit_code=0,
        check=one_step_is_whole,
    ),
    Fault(
        name="Ctrl-C",
        message="stopped after step 3 of 1000: SIGINT came to rank 0; its checkpoint is whole, and "
        "the same command goes on",
        cause="Somebody ends the job by hand.",
        remedy="Start the same command again.",
        arrange=flags(_BROKEN, *LONG_SAVING),
        environment=breaks("SIGINT"),
        exit_code=0,
        check=one_step_is_whole,
    ),
    Fault(
        name="second signal while a run is ending",
        message="SIGTERM came as a second signal: ending without a checkpoint",
        cause="Somebody has no time for the step and the save.",
        remedy="Start the same command again: it goes on from the checkpoint before.",
        arrange=flags(_BROKEN, *LONG_SAVING),
        environment=breaks("SIGTERM", BROKEN_TIMES="2"),
        exit_code=143,
    ),
    Fault(
        name="SIGTERM without checkpoints",
        message="SIGTERM: the run ends; nothing is saved (checkpoint.enable)",
        cause="A scheduler or an administrator ends a job that keeps nothing.",
        remedy="Set checkpoint.enable.",
        arrange=flags(_BROKEN, "--training.steps=1000"),
        environment=breaks("SIGTERM"),
        exit_code=143,
    ),
    Fault(
        name="Ctrl-C without checkpoints",
        message="interrupted; what was not saved is lost",
        cause="Somebody ends a job that keeps nothing.",
        remedy="Set checkpoint.enable.",
        arrange=flags(_BROKEN, "--training.steps=1000"),
        environment=breaks("SIGINT"),
        exit_code=130,
    ),
    Fault(
        name="time limit that comes near",
        message="stopped after step …: training.time_limit_minutes = 0.02 leaves no more time; its "
        "checkpoint is whole, and the same command goes on",
        cause="The scheduler's limit is near, and training.time_limit_minutes says so.",
        remedy="Start the same command again.",
        arrange=flags(*LONG_SAVING, "--training.time_limit_minutes=0.02", "--metrics.log_freq=10"),
        exit_code=0,
        check=one_step_is_whole,
    ),
    Fault(
        name="time limit without checkpoints",
        message="config error: training.time_limit_minutes ends the run with a checkpoint, got "
        "checkpoint.enable = False…",
        cause="training.time_limit_minutes is set, and nothing is saved.",
        remedy="Set checkpoint.enable.",
        arrange=flags("--training.time_limit_minutes=60"),
    ),
]
