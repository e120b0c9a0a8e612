"""Faults of the config: one message, before anything is built."""

from pathlib import Path

from tests.reliability.faults import Fault


def toml(text: str):
    """Arranges a TOML file with this text."""

    def arrange(folder: Path) -> list[str]:
        (folder / "job.toml").write_text(text)
        return [f"--job.config_file={folder}/job.toml"]

    return arrange


def flags(*arguments: str):
    return lambda folder: arguments


def _written(path: Path, content: bytes) -> Path:
    path.write_bytes(content)
    return path


def with_csv(text: str):
    """Arranges a pipeline of two ranks with the order in a file of this text."""

    def arrange(folder: Path) -> list[str]:
        (folder / "order.csv").write_text(text)
        return [
            "--training.local_batch_size=2",
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.pipeline_parallel_schedule=PipelineScheduleMulti",
            f"--parallelism.pipeline_parallel_schedule_csv={folder}/order.csv",
        ]

    return arrange


FAULTS = {
    "TOML that cannot be parsed": toml("[training]\nsteps = = 3\n"),
    "TOML that is not text": lambda folder: [
        f"--job.config_file={_written(folder / 'job.toml', b'[training]' + bytes([10, 255]))}"
    ],
    "unknown key in TOML": toml("[training]\nsetps = 3\n"),
    "value of another type in TOML": toml('[training]\nsteps = "ten"\n'),
    "TOML file that is not there": flags("--job.config_file=/nowhere/job.toml"),
    "dump folder that cannot be written": flags("--job.dump_folder=/proc/x"),
    "sequence length of zero": flags("--training.seq_len=0"),
    "steps of 23 digits": flags("--training.steps=10000000000000000000000"),
    "home folder of nobody": flags("--job.dump_folder=~nobody-of-that-name/run"),
    "learning rate that is no number": flags("--optimizer.lr=nan"),
    "unknown compile backend": flags("--compile.enable", "--compile.backend=inductr"),
    "unknown model": flags("--model.name=lama3"),
    "group of parameters that is empty": toml('[[optimizer.groups]]\npattern = "nrom"\n'),
    "unknown converter": flags("--model.converters=float8"),
    "batch that ranks cannot share": flags(
        "--training.local_batch_size=4", "--training.global_batch_size=10"
    ),
    "degrees for another number of processes": flags("--parallelism.data_parallel_shard_degree=3"),
    "documents kept apart by a kernel that cannot": flags(
        "--model.attn_type=sdpa", "--model.attn_mask_type=block_causal"
    ),
    "path that is not text": flags("--metrics.save_tb_folder=tb\udcff"),
    "pipeline order that is no CSV of actions": Fault(with_csv("hello,world\n0F0,\n"), ranks=2),
    "pipeline order for other ranks": Fault(with_csv("0F0,0B0\n"), ranks=2),
}
