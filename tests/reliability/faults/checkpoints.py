"""Faults of saving and resuming: no step is lost without a word, and none that is whole."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from tests.reliability.faults import SAVING, Fault
from tests.reliability.jobs import TOKENIZER
from torchtitan.tools.folder_lock import FolderLock

# With the limit of tests/reliability/file_size_limit.py on some ranks.
LIMITED = "--experimental.custom_import=tests.reliability.file_size_limit"
FULL_DISK = "--experimental.custom_import=tests.reliability.full_disk"
HF_EXPORT = ("--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf")


def step(folder: Path, number: int) -> Path:
    return folder / "outputs/checkpoint" / f"step-{number}"


def resume(*arguments: str, change: Callable[[Path], object] | None = None):
    """Goes on with a finished run, 4 steps long, after a change to its files."""

    def arrange(folder: Path) -> list[str]:
        if change is not None:
            change(folder)
        return [*SAVING, *arguments]

    return arrange


def truncate(folder: Path) -> None:
    path = step(folder, 4) / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-100])


def empty_hashes(folder: Path) -> None:
    (step(folder, 4) / ".sha256sums").write_text("")


def remove_metadata_of(*steps: int):
    def remove(folder: Path) -> None:
        for number in steps:
            (step(folder, number) / ".metadata").unlink()

    return remove


def interrupt(folder: Path) -> None:
    (step(folder, 4) / ".incomplete").touch()


def put_file_in_place_of_step_6(folder: Path) -> None:
    step(folder, 6).write_text("a file")


def put_file_in_place_of_checkpoints(folder: Path) -> None:
    (folder / "outputs").mkdir()
    (folder / "outputs/checkpoint").write_text("a file")


def put_checkpoints_where_nobody_can_write(folder: Path) -> None:
    (folder / "outputs").mkdir()
    (folder / "outputs/checkpoint").symlink_to("/proc/self")


def start_from_elsewhere(folder: Path) -> list[str]:
    """The own folder holds only what isn't a checkpoint; the initial one is whole."""
    (folder / "outputs/checkpoint").rename(folder / "source")
    step(folder, 9).mkdir(parents=True)
    (step(folder, 9) / "notes.txt").write_text("of somebody else")
    return [*SAVING, f"--checkpoint.initial_load_path={folder}/source/step-4"]


def start_from_folder_of_steps(folder: Path) -> list[str]:
    (folder / "outputs/checkpoint").rename(folder / "source")
    return [*SAVING, f"--checkpoint.initial_load_path={folder}/source"]


def start_from_hf_files(folder: Path) -> list[str]:
    (folder / "weights").mkdir()
    (folder / "weights/model.safetensors").touch()
    return [*SAVING, f"--checkpoint.initial_load_path={folder}/weights"]


def take_other_tokenizer(folder: Path) -> list[str]:
    """One that has two tokens in each other's place."""
    shutil.copytree(TOKENIZER, folder / "tokenizer")
    path = folder / "tokenizer/tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    vocab["od"], vocab["st"] = vocab["st"], vocab["od"]
    path.write_text(json.dumps(tokenizer))
    return [*SAVING, "--training.steps=5", f"--model.hf_assets_path={folder}/tokenizer"]


def keep_weights_only(folder: Path) -> None:
    path = step(folder, 4)
    entries = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    weights = {
        name: torch.empty(entry.size)
        for name, entry in entries.items()
        if hasattr(entry, "size") and not name.startswith("optimizer.")
    }
    dcp.load(weights, checkpoint_id=path, no_dist=True)
    shutil.rmtree(path)
    dcp.save(weights, checkpoint_id=path, no_dist=True)


_locks: dict[Path, FolderLock] = {}


def start_in_folder_of_other_job(name: str):
    def arrange(folder: Path) -> list[str]:
        _locks[folder] = FolderLock(str(folder / name))
        return SAVING

    return arrange


def release(folder: Path) -> None:
    _locks.pop(folder).release()


def whole_steps(*numbers: int):
    def check(folder: Path) -> None:
        for number in numbers:
            names = {path.name for path in step(folder, number).iterdir()}
            assert {".metadata", ".sha256sums"} <= names and ".incomplete" not in names

    return check


def removed_step(number: int):
    def check(folder: Path) -> None:
        assert not step(folder, number).exists()

    return check


def older_steps_are_whole(folder: Path) -> None:
    whole_steps(2, 4)(folder)
    removed_step(6)(folder)


def flags(*arguments: str):
    return lambda folder: [*SAVING, *arguments]


FAULTS = [
    # Damaged steps
    Fault(
        name="newest checkpoint cut short",
        message="Passing over …step-4: it is damaged, __0_0.distcp does not have the content that "
        "was written (SHA-256 differs)…the run continues after step 2…training completed",
        cause="A disk error, a copy that was cut off, or a change by hand.",
        remedy="None needed: the run goes on from the step before, and writes this one again.",
        arrange=resume(change=truncate),
        exit_code=0,
        after_run=True,
        check=whole_steps(2, 4),
    ),
    Fault(
        name="checkpoint without .metadata",
        message="Passing over …step-4: it is damaged, .metadata is missing…the run continues after "
        "step 2…Replacing the checkpoint …step-4",
        cause="The file was deleted, or a copy left out names that begin with a dot.",
        remedy="Copy the file from where it is still there, or let the run go on from the step "
        "before.",
        arrange=resume(change=remove_metadata_of(4)),
        exit_code=0,
        after_run=True,
        check=whole_steps(2, 4),
    ),
    Fault(
        name="list of hashes emptied",
        message="Passing over …step-4: it is damaged, .sha256sums is damaged…the run "
        "continues after step 2",
        cause="The file was cut or changed.",
        remedy="None needed; or set checkpoint.verify_on_load = false to read the step nevertheless.",
        arrange=resume(change=empty_hashes),
        exit_code=0,
        after_run=True,
    ),
    Fault(
        name="every checkpoint damaged",
        message="error: Every checkpoint in …outputs/checkpoint is damaged (…step-4, …step-2). Move "
        "the folder away to start again, or set checkpoint.verify_on_load = false",
        cause="No step has all its files as they were written.",
        remedy="Restore a step from a copy; or move the folder away to start from scratch.",
        arrange=resume(change=remove_metadata_of(2, 4)),
        exit_code=1,
        after_run=True,
    ),
    Fault(
        name="save that was interrupted",
        message="Passing over …step-4: its save was interrupted…the run continues after step 2",
        cause="The job was killed while it wrote this step.",
        remedy="None needed: the run goes on from the step before, and writes this one again.",
        arrange=resume(change=interrupt),
        exit_code=0,
        after_run=True,
        check=whole_steps(2, 4),
    ),
    Fault(
        name="damaged step asked for by number",
        message="error: The checkpoint …step-4 is damaged: __0_0.distcp does not have the content "
        "that was written (SHA-256 differs). Load another checkpoint, or "
        "set checkpoint.verify_on_load = false",
        cause="The step that checkpoint.load_step names was changed after it was written.",
        remedy="Name another step, or -1 for the newest that is whole.",
        arrange=resume("--checkpoint.load_step=4", change=truncate),
        exit_code=1,
        after_run=True,
    ),
    Fault(
        name="interrupted step asked for by number",
        message="error: The checkpoint …step-4 is incomplete: its save was interrupted",
        cause="The job was killed while it wrote the step that checkpoint.load_step names.",
        remedy="Name another step, or -1 for the newest that is whole.",
        arrange=resume("--checkpoint.load_step=4", change=interrupt),
        exit_code=1,
        after_run=True,
    ),
    Fault(
        name="step that is not there",
        message="config error: checkpoint.load_step must be a step saved in …outputs/checkpoint', "
        "got 3; saved are step-2, step-4, and -1 takes the newest",
        cause="checkpoint.load_step names a step that was not saved, or has been removed.",
        remedy="Name one of those that are listed.",
        arrange=resume("--checkpoint.load_step=3"),
        after_run=True,
    ),
    Fault(
        name="older step asked for by number",
        message="…outputs/checkpoint holds steps after 2 (4), which this run replaces when it "
        "reaches them…the run continues after step 2…Replacing the checkpoint …step-4",
        cause="checkpoint.load_step goes back before the newest step.",
        remedy="None needed; to keep the newer steps, continue in another checkpoint.folder with "
        "checkpoint.initial_load_path.",
        arrange=resume("--checkpoint.load_step=2"),
        exit_code=0,
        after_run=True,
    ),
    # What a run starts from
    Fault(
        name="foreign folder among the checkpoints",
        message="Passing over …step-9: it holds no checkpoint (there is no file .metadata)…"
        "Loading the checkpoint …source/step-4",
        cause="A folder with the name of a step, but without a checkpoint.",
        remedy="None needed: the initial checkpoint is loaded. Better move the folder away.",
        arrange=start_from_elsewhere,
        exit_code=0,
        after_run=True,
    ),
    Fault(
        name="initial_load_path that is the folder of all steps",
        message="error: checkpoint.initial_load_path must be the folder of a checkpoint (with a "
        "file .metadata), got …source'; name one of the checkpoints in it: step-2, step-4",
        cause="checkpoint.initial_load_path is not the folder of one step.",
        remedy="Name one of the steps that are listed.",
        arrange=start_from_folder_of_steps,
        exit_code=1,
        after_run=True,
    ),
    Fault(
        name="initial_load_path that does not exist",
        message="config error: checkpoint.initial_load_path must be an existing checkpoint folder, "
        "got 'nowhere'",
        cause="A typing error, or a file system that is not mounted.",
        remedy="Correct checkpoint.initial_load_path.",
        arrange=flags("--checkpoint.initial_load_path=nowhere"),
    ),
    Fault(
        name="initial_load_path with Hugging Face files",
        message="error: checkpoint.initial_load_path …weights' holds Hugging Face weights; set "
        "checkpoint.initial_load_in_hf = true to read them",
        cause="The folder holds safetensors files and no checkpoint.",
        remedy="Set checkpoint.initial_load_in_hf = true.",
        arrange=start_from_hf_files,
        exit_code=1,
    ),
    Fault(
        name="checkpoint of another model",
        message="error: The checkpoint …step-4 does not fit qwen3 debugmodel, the model of the "
        "config (not in the checkpoint: …). Set model.name and model.flavor to the saved "
        "model, or load another checkpoint",
        cause="The dump folder belongs to a run of another model.",
        remedy="Set model.name and model.flavor back, or choose another job.dump_folder.",
        arrange=resume("--model.name=qwen3", "--training.steps=5"),
        exit_code=1,
        after_run=True,
    ),
    Fault(
        name="newest checkpoint with weights only",
        message="error: the newest checkpoint, of step 4, holds weights only "
        "(checkpoint.last_save_model_only), so the run cannot continue from it. Set "
        "checkpoint.load_step to an earlier full one, or start a new run",
        cause="The run ended with checkpoint.last_save_model_only, and somebody wants to continue it.",
        remedy="Set checkpoint.load_step to an earlier step, or start a new run with these weights "
        "as checkpoint.initial_load_path.",
        arrange=resume("--training.steps=6", change=keep_weights_only),
        exit_code=1,
        after_run=True,
        absent=("start from zero", "Loading the checkpoint"),
    ),
    Fault(
        name="run that is complete",
        message="this run is complete: its checkpoint of step 4 reaches training.steps = 4",
        cause="The job was started again after its last step.",
        remedy="Raise training.steps to go on, or choose another job.dump_folder.",
        arrange=resume(),
        exit_code=0,
        after_run=True,
        absent=("Loading the checkpoint",),
    ),
    # What a resume has otherwise
    Fault(
        name="resume with another optimizer",
        message="error: …step-4 was saved with optimizer.name = 'AdamW', got 'Adam'; set it back, or "
        "start the new optimizer's state from zero with checkpoint.exclude_from_loading = "
        "['optimizer']",
        cause="optimizer.name was changed; the state of one kind means something else to another.",
        remedy="Set optimizer.name back, or leave the optimizer out with "
        "checkpoint.exclude_from_loading.",
        arrange=resume("--optimizer.name=Adam", "--training.steps=5"),
        exit_code=1,
        after_run=True,
    ),
    Fault(
        name="resume with another learning rate",
        message="Continuing from …step-4, but optimizer.lr was 0.0008 when it was saved and is 0.5 "
        "now: the saved one is used",
        cause="optimizer.lr was changed. The peak of the schedule is part of the checkpoint.",
        remedy="Start a new run with checkpoint.initial_load_path to train on with another rate.",
        arrange=resume("--optimizer.lr=0.5", "--training.steps=5"),
        exit_code=0,
        after_run=True,
    ),
    Fault(
        name="resume with another tokenizer",
        message="error: The run cannot continue from …step-4: content of model.hf_assets_path was …when it "
        "was saved and is …now. The model would compute or read something else than it was trained on; "
        "set it back, or allow it with checkpoint.allow_changed = ['model.hf_assets_path']",
        cause="The files at model.hf_assets_path have changed, or the path has.",
        remedy="Set model.hf_assets_path back to the tokenizer of the run.",
        arrange=take_other_tokenizer,
        exit_code=1,
        after_run=True,
    ),
    Fault(
        name="resume with another sequence length and batch",
        message="Continuing from …step-4, but training.seq_len was 32 when it was saved and is 64 now: "
        "this run's is used…but global batch size was 1 when it was saved and is 2 now: this run's is used",
        cause="The shape of a batch was changed, or the number of data-parallel ranks.",
        remedy="None needed if it was meant; set training.global_batch_size to keep the batch on "
        "another number of ranks.",
        arrange=resume(
            "--training.seq_len=64", "--training.local_batch_size=2", "--training.steps=5"
        ),
        exit_code=0,
        after_run=True,
    ),
    Fault(
        name="resume of another function",
        message="error: The run cannot continue from …step-4: model.args.norm_eps was '1e-05' when it was "
        "saved and is '0.001' now. The model would compute or read something else than it was trained "
        "on; set it back, or allow it with checkpoint.allow_changed = ['model.args.norm_eps']",
        cause="A setting was changed that changes what the model computes.",
        remedy="Set it back, or allow it if it was meant.",
        arrange=resume("--model.args", "norm_eps=1e-3", "--training.steps=5"),
        exit_code=1,
        after_run=True,
    ),
    Fault(
        name="resume with other data",
        message="error: The run cannot continue from …step-4: content of training.dataset_path was …"
        "when it was saved and is …now; training.dataset was 'local' when it was saved and is "
        "'python_docs' now. The model would compute or read something else than it was trained on; set "
        "it back, or allow it with checkpoint.allow_changed = ['training.dataset', "
        "'training.dataset_path']",
        cause="training.dataset or dataset_path was changed, or the files there have.",
        remedy="Set it back, or leave the data position out with checkpoint.exclude_from_loading = "
        "['dataloader'] to read the new data from their beginning.",
        arrange=resume(
            "--training.dataset=python_docs",
            "--training.dataset_path=None",
            "--training.steps=5",
        ),
        exit_code=1,
        after_run=True,
    ),
    # Settings
    Fault(
        name="unknown name in exclude_from_loading",
        message="error: checkpoint.exclude_from_loading can hold train_state, model, optimizer, "
        "dataloader, lr_scheduler, got 'foo'; correct or remove it",
        cause="A typing error.",
        remedy="Use one of the names that are listed.",
        arrange=flags("--checkpoint.exclude_from_loading=foo"),
    ),
    Fault(
        name="checkpoint folder outside the dump folder",
        message="config error: checkpoint.folder is a path inside job.dump_folder, so it must not "
        "contain '..', got '../elsewhere'",
        cause="Two jobs with dump folders of their own could meet there.",
        remedy="Change job.dump_folder.",
        arrange=flags("--checkpoint.folder=../elsewhere"),
    ),
    Fault(
        name="empty dump folder",
        message="config error: job.dump_folder must name a folder, got ''; the default is "
        "'./outputs'",
        cause="For example, an environment variable in the command is not set.",
        remedy="Give the folder.",
        arrange=flags("--job.dump_folder="),
    ),
    Fault(
        name="keep_latest_k of 1",
        message="config error: checkpoint.keep_latest_k must be 0 (keep all) or at least 2, …got 1; "
        "use 2 to keep as few as possible",
        cause="While the only checkpoint is replaced there would be none to go back to.",
        remedy="Set checkpoint.keep_latest_k to 2.",
        arrange=flags("--checkpoint.keep_latest_k=1"),
    ),
    Fault(
        name="export to Hugging Face files of a full checkpoint",
        message="config error: checkpoint.last_save_in_hf = True needs "
        "checkpoint.last_save_model_only = True, got False",
        cause="Hugging Face files hold weights and nothing else.",
        remedy="Set checkpoint.last_save_model_only = true.",
        arrange=flags("--checkpoint.last_save_in_hf"),
    ),
    # Failed saves
    Fault(
        name="two jobs in one checkpoint folder",
        message="error: …outputs/checkpoint is in use by process … on … since …, and two jobs would "
        "overwrite and remove each other's files. Wait for that job or stop it, or give this job a "
        "folder of its own (job.dump_folder, and checkpoint.folder if it is a path)",
        cause="Two jobs with dump folders of their own have one checkpoint.folder.",
        remedy="Stop the other job, or set checkpoint.folder. A job that has died holds nothing.",
        arrange=start_in_folder_of_other_job("outputs/checkpoint"),
        exit_code=1,
        check=release,
    ),
    Fault(
        name="two jobs in one dump folder",
        message="error: …outputs is in use by process … on … since …, and two jobs would overwrite "
        "and remove each other's files. Wait for that job or stop it, or give this job a folder of "
        "its own (job.dump_folder, and checkpoint.folder if it is a path)",
        cause="The same job or server was started twice, or two jobs have one dump folder.",
        remedy="Stop the other job, or set job.dump_folder. A job that has died holds nothing.",
        arrange=start_in_folder_of_other_job("outputs"),
        exit_code=1,
        check=release,
    ),
    Fault(
        name="file where the checkpoint folder should be",
        message="config error: checkpoint.folder must be a folder, or a place for one, got …"
        "outputs/checkpoint', but …outputs/checkpoint' is a file; choose another",
        cause="Something else wrote a file with this name.",
        remedy="Move the file away, or set checkpoint.folder.",
        arrange=lambda folder: (put_file_in_place_of_checkpoints(folder), SAVING)[1],
    ),
    Fault(
        name="checkpoint folder that cannot be written",
        message="config error: checkpoint.folder must be writable, got …outputs/checkpoint', but it "
        "cannot be created in …outputs/checkpoint' (…); choose another",
        cause="The file system is read-only or full, or the folder belongs to somebody else.",
        remedy="Make room, or choose a folder that this user may write to.",
        arrange=lambda folder: (put_checkpoints_where_nobody_can_write(folder), SAVING)[1],
    ),
    Fault(
        name="checkpoint folder with too long a name",
        message="config error: checkpoint.folder must be writable, got …(File name too long)",
        cause="File systems take names of up to 255 bytes.",
        remedy="Shorten checkpoint.folder.",
        arrange=flags(f"--checkpoint.folder={'n' * 300}"),
    ),
    Fault(
        name="disk that gets full",
        message="error: The checkpoint …step-6 could not be written (on rank 0): OSError: [Errno 28] "
        "No space left on device. Fix this and start again: the last whole checkpoint in …"
        "outputs/checkpoint is that of step 4",
        cause="The disk, or this user's quota, is used up. What was written of the step is removed.",
        remedy="Make room, or lower checkpoint.keep_latest_k, and start the job again.",
        arrange=resume("--training.steps=6", FULL_DISK),
        exit_code=1,
        after_run=True,
        check=older_steps_are_whole,
    ),
    Fault(
        name="disk that gets full while a save is written beside training",
        message="error: The asynchronous save to …step-6 failed (on rank 0): OSError: [Errno 28] No "
        "space left on device. Fix this and start again: the last whole checkpoint in …"
        "outputs/checkpoint is that of step 4",
        cause="The disk, or this user's quota, is used up. What was written of the step is removed.",
        remedy="Make room, or lower checkpoint.keep_latest_k, and start the job again.",
        arrange=resume("--training.steps=7", "--checkpoint.async_mode=async", FULL_DISK),
        exit_code=1,
        after_run=True,
        check=older_steps_are_whole,
    ),
    Fault(
        name="limit on the size of files",
        message="error: The checkpoint …step-2 could not be written (on rank 1): OSError: [Errno 27] "
        "File too large. Fix this and start again; …outputs/checkpoint holds no whole checkpoint "
        "yet",
        cause="A limit of the shell or the batch system (ulimit -f), on one of the nodes.",
        remedy="Raise the limit, and start the job again.",
        arrange=flags(LIMITED),
        exit_code=1,
        ranks=2,
        environment={"LIMITED_RANKS": "1"},
        check=removed_step(2),
    ),
    Fault(
        name="file where a step's folder should be",
        message="error: The checkpoint …step-6 could not be written (on rank 0): FileExistsError: …"
        "step-6'. Fix this and start again: the last whole checkpoint in …outputs/checkpoint is "
        "that of step 4",
        cause="Something else wrote a file with this name.",
        remedy="Move the file away, and start the job again.",
        arrange=resume("--training.steps=6", change=put_file_in_place_of_step_6),
        exit_code=1,
        after_run=True,
    ),
    Fault(
        name="export to Hugging Face files that fails",
        message="error: The checkpoint …step-4 could not be written…: OSError: [Errno 27] File too "
        "large. Fix this and start again; …outputs/checkpoint holds no whole checkpoint yet",
        cause="The disk is full, or files may not become as large as they are to be.",
        remedy="Make room or raise the limit, and start the job again.",
        arrange=flags(LIMITED, *HF_EXPORT, "--checkpoint.interval=9"),
        exit_code=1,
        environment={"LIMITED_RANKS": "0"},
        check=removed_step(4),
    ),
    Fault(
        name="export to Hugging Face files that fails on one rank",
        message="error: The checkpoint …step-4 could not be written…: OSError: [Errno 27] File too "
        "large. Fix this and start again; …outputs/checkpoint holds no whole checkpoint yet",
        cause="The disk of one node is full, or files may not become as large as they are to be.",
        remedy="Make room or raise the limit, and start the job again.",
        arrange=flags(LIMITED, *HF_EXPORT, "--checkpoint.interval=9"),
        exit_code=1,
        ranks=2,
        environment={"LIMITED_RANKS": "1"},
        check=removed_step(4),
    ),
]
