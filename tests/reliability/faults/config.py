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
    "sequence length of 14 digits": flags("--training.seq_len=10000000000000"),
    "steps of 23 digits": flags("--training.steps=10000000000000000000000"),
    "time-out of 12 digits": flags("--comm.train_timeout_seconds=100000000000"),
    "no batch to prefetch": flags(
        "--training.dataloader.num_workers=1", "--training.dataloader.prefetch_factor=0"
    ),
    "seed beyond 64 bits": flags("--debug.seed=18446744073709551616"),
    "home folder of nobody": flags("--job.dump_folder=~nobody-of-that-name/run"),
    "device in place of data": flags(
        "--training.dataset=local", "--training.dataset_path=/dev/zero"
    ),
    "learning rate that is no number": flags("--optimizer.lr=nan"),
    "negative clipping": flags("--training.max_norm=-1"),
    "every zeroth layer": flags(
        "--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=0"
    ),
    "unknown determinism check": flags("--activation_checkpoint.determinism_check=strict"),
    "unknown compile backend": flags("--compile.enable", "--compile.backend=inductr"),
    "unknown model": flags("--model.name=lama3"),
    "unknown flavor": flags("--model.flavor=8b"),
    "unknown optimizer": flags("--optimizer.name=SGDD"),
    "group of parameters that is empty": toml('[[optimizer.groups]]\npattern = "nrom"\n'),
    "option of Muon for another optimizer": flags("--optimizer.muon.momentum=0.9"),
    "unknown converter": flags("--model.converters=float8"),
    "batch that ranks cannot share": flags(
        "--training.local_batch_size=4", "--training.global_batch_size=10"
    ),
    "degrees for another number of processes": flags("--parallelism.data_parallel_shard_degree=3"),
    "documents kept apart by a kernel that cannot": flags(
        "--model.attn_type=sdpa", "--model.attn_mask_type=block_causal"
    ),
    "NaN for a fraction": flags("--lr_scheduler.decay_ratio=nan"),
    "path that is not text": flags("--metrics.save_tb_folder=tb\udcff"),
    "profile longer than its cycle": flags(
        "--profiling.enable_profiling", "--profiling.profile_freq=2"
    ),
    "pipeline order that is no CSV of actions": Fault(with_csv("hello,world\n0F0,\n"), ranks=2),
    "pipeline order for other ranks": Fault(with_csv("0F0,0B0\n"), ranks=2),
}
