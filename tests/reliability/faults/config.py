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


def flag_fault(name: str, flags_: tuple[str, ...], message: str, cause: str, remedy: str, **more):
    return Fault(name, f"config error: {message}", cause, remedy, flags(*flags_), **more)


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


TYPING_ERROR = "A typing error, or a number with too many digits."

FAULTS = [
    Fault(
        name="TOML that cannot be parsed",
        message="config error: …job.toml, line 2: not valid TOML: …",
        cause="A typing error in the file.",
        remedy="Correct the line.",
        arrange=toml("[training]\nsteps = = 3\n"),
    ),
    Fault(
        name="TOML that is not text",
        message="config error: …job.toml, line 2: not valid TOML: the file is not UTF-8 text",
        cause="Another file's name was given, or an editor wrote another encoding.",
        remedy="Save the file as UTF-8.",
        arrange=lambda folder: [
            f"--job.config_file={_written(folder / 'job.toml', b'[training]' + bytes([10, 255]))}"
        ],
    ),
    Fault(
        name="unknown key in TOML",
        message="config error: …'setps' in [training] is unknown, did you mean 'steps'?",
        cause="A typing error, or a key of another version.",
        remedy="Correct the name; --help lists all keys.",
        arrange=toml("[training]\nsetps = 3\n"),
    ),
    Fault(
        name="value of another type in TOML",
        message="config error: [training] steps = 'ten': expected int, got str; the default is 10000",
        cause="For example, a number is in quotes.",
        remedy="Write a value of the type that the message names.",
        arrange=toml('[training]\nsteps = "ten"\n'),
    ),
    flag_fault(
        "TOML file that is not there",
        ("--job.config_file=/nowhere/job.toml",),
        "job.config_file names a TOML file that has to exist, got '/nowhere/job.toml' …",
        "The path is wrong, or relative to another folder.",
        "Correct the path, or start in the folder it is relative to.",
    ),
    flag_fault(
        "dump folder that cannot be written",
        ("--job.dump_folder=/proc/x",),
        "job.dump_folder …'/proc/x'…",
        "The folder is on a read-only file system, or belongs to somebody else.",
        "Set job.dump_folder to a folder that this user may write to.",
    ),
    flag_fault(
        "sequence length of zero",
        ("--training.seq_len=0",),
        "training.seq_len must be at least 1, got 0; the default is 2048",
        "A typing error.",
        "Give the tokens of a row.",
    ),
    flag_fault(
        "sequence length of 14 digits",
        ("--training.seq_len=10000000000000",),
        "training.seq_len must be at most 1000000000, got 10000000000000; the default is 2048",
        TYPING_ERROR,
        "Give a smaller number.",
    ),
    flag_fault(
        "steps of 23 digits",
        ("--training.steps=10000000000000000000000",),
        "training.steps must be at most 1000000000000, got 10000000000000000000000; …",
        TYPING_ERROR,
        "Give a smaller number.",
    ),
    flag_fault(
        "time-out of 12 digits",
        ("--comm.train_timeout_seconds=100000000000",),
        "comm.train_timeout_seconds must be at most 100000000, got 100000000000; …",
        "Milliseconds or nanoseconds were given.",
        "Give seconds.",
    ),
    flag_fault(
        "no batch to prefetch",
        ("--training.dataloader.num_workers=1", "--training.dataloader.prefetch_factor=0"),
        "training.dataloader.prefetch_factor must be at least 1, got 0; …",
        "0 was taken for the default.",
        "Leave the key out, or give 1 or more.",
    ),
    flag_fault(
        "seed beyond 64 bits",
        ("--debug.seed=18446744073709551616",),
        "debug.seed must be at most 18446744073709551615, got 18446744073709551616; …",
        "A hash or a date was given as the seed.",
        "Give a number of 64 bits.",
    ),
    flag_fault(
        "home folder of nobody",
        ("--job.dump_folder=~nobody-of-that-name/run",),
        "job.dump_folder must not begin with '~', which was not replaced by a home folder, "
        "got '~nobody-of-that-name/run'; …",
        "The user is mistyped, or unknown on this machine.",
        "Give the whole path.",
    ),
    flag_fault(
        "device in place of data",
        ("--training.dataset=local", "--training.dataset_path=/dev/zero"),
        "training.dataset_path must be a regular file or a folder, got '/dev/zero', a device, pipe or "
        "socket; write the data to a file",
        "The data were to come through a pipe, or the path is mistyped.",
        "Write the data to a file.",
    ),
    flag_fault(
        "learning rate that is no number",
        ("--optimizer.lr=nan",),
        "optimizer.lr must be at least 0, got nan; the default is 0.0008",
        "It was computed, and the computation failed.",
        "Give a number.",
    ),
    flag_fault(
        "negative clipping",
        ("--training.max_norm=-1",),
        "training.max_norm must be above 0, or inf, got -1…; the default is 1.0",
        "-1 was meant to turn clipping off.",
        "Give inf for that.",
    ),
    flag_fault(
        "every zeroth layer",
        ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=0"),
        "activation_checkpoint.selective_ac_option must be 'op' or a whole number n of at least 1 …",
        "0 was meant to turn recomputing off.",
        "Set activation_checkpoint.mode to none for that.",
    ),
    flag_fault(
        "unknown determinism check",
        ("--activation_checkpoint.determinism_check=strict",),
        "activation_checkpoint.determinism_check must be one of default, none, got 'strict'",
        "A typing error.",
        "Take one of the two.",
    ),
    flag_fault(
        "unknown compile backend",
        ("--compile.enable", "--compile.backend=inductr"),
        "compile.backend must be one of …, got 'inductr', did you mean 'inductor'?…",
        "A typing error, or the module that registers it was not imported.",
        "Correct the name, or name the module in experimental.custom_import.",
    ),
    flag_fault(
        "unknown model",
        ("--model.name=lama3",),
        "…lama3…llama3…",
        "A typing error, or the module that registers it was not imported.",
        "Correct the name, or name the module in experimental.custom_import.",
    ),
    flag_fault(
        "unknown flavor",
        ("--model.flavor=8b",),
        "model.flavor of 'llama3' must be one of …, got '8b', did you mean '8B'?",
        "A typing error.",
        "Take a name of the list.",
    ),
    flag_fault(
        "unknown optimizer",
        ("--optimizer.name=SGDD",),
        "optimizer.name must be one of Adam, AdamW, Muon, got 'SGDD'…",
        "The model has no such optimizer.",
        "Take one of the list, or give the train spec a builder of its own.",
    ),
    Fault(
        name="group of parameters that is empty",
        message="error: optimizer.groups[0].pattern = 'nrom' fits no name of a parameter, …",
        cause="A typing error, or a pattern for another model.",
        remedy="Correct the pattern; names are those in checkpoints.",
        arrange=toml('[[optimizer.groups]]\npattern = "nrom"\n'),
    ),
    flag_fault(
        "option of Muon for another optimizer",
        ("--optimizer.muon.momentum=0.9",),
        "optimizer.muon.momentum = 0.9 has no effect with optimizer.name = 'AdamW'; set the name to …",
        "The optimizer's name was left out.",
        "Set optimizer.name to Muon.",
    ),
    flag_fault(
        "unknown converter",
        ("--model.converters=float8",),
        "each name in model.converters must be one of …, got 'float8', did you mean …",
        "A typing error.",
        "Correct the name.",
    ),
    flag_fault(
        "batch that ranks cannot share",
        ("--training.local_batch_size=4", "--training.global_batch_size=10"),
        "training.global_batch_size must be a multiple of local_batch_size * data-parallel ranks, "
        "got 10 with 4 * 1; the nearest that fits is 8",
        "A global batch is made of whole local ones.",
        "Take the number that the message names.",
    ),
    flag_fault(
        "degrees for another number of processes",
        ("--parallelism.data_parallel_shard_degree=3",),
        "the parallelism degrees must multiply to the number of processes, got 1 processes and a "
        "product of 3: …",
        "The config is for another number of ranks.",
        "Start as many processes, or set data_parallel_shard_degree to -1.",
    ),
    flag_fault(
        "documents kept apart by a kernel that cannot",
        ("--model.attn_type=sdpa", "--model.attn_mask_type=block_causal"),
        "model.attn_type = 'sdpa' cannot keep documents apart, …",
        "sdpa takes no mask.",
        "Set model.attn_type to flex or varlen.",
    ),
    flag_fault(
        "NaN for a fraction",
        ("--lr_scheduler.decay_ratio=nan",),
        "lr_scheduler.decay_ratio must be at least 0, got nan; the default is None",
        "It was computed, and the computation failed.",
        "Give a number from 0 to 1.",
    ),
    flag_fault(
        "path that is not text",
        ("--metrics.save_tb_folder=tb\udcff",),
        "metrics.save_tb_folder must be text without NUL characters and in UTF-8, got …",
        "The shell passed on a byte that is not a character, for example from a file name.",
        "Rename the file.",
    ),
    flag_fault(
        "only checkpoint to keep",
        ("--checkpoint.keep_latest_k=1",),
        "checkpoint.keep_latest_k must be 0 (keep all) or at least 2, …got 1; use 2 …",
        "The only one would be removed before its successor is whole.",
        "Set it to 2.",
    ),
    flag_fault(
        "profile longer than its cycle",
        ("--profiling.enable_profiling", "--profiling.profile_freq=2"),
        "profiling.profile_freq must be at least profiler_warmup + profiler_active, got 2 …",
        "Warm-up and recording don't fit into the cycle.",
        "Raise profile_freq to the number that the message names.",
    ),
    Fault(
        name="pipeline order that is no CSV of actions",
        message="config error: …order.csv', line 1: 'hello' is no action; …",
        cause="Another file's name was given.",
        remedy="Give a file with a line per pipeline rank, of cells like 0F0.",
        arrange=with_csv("hello,world\n0F0,\n"),
        ranks=2,
    ),
    Fault(
        name="pipeline order for other ranks",
        message="config error: …order.csv' has 1 lines, and parallelism.pipeline_parallel_degree is "
        "2; …",
        cause="The file is for another number of ranks.",
        remedy="Give a file with a line per pipeline rank.",
        arrange=with_csv("0F0,0B0\n"),
        ranks=2,
    ),
]
