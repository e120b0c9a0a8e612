"""Kill runs that save to a bucket at random instants, lose or damage their disks, and see how they resume.

    python -m tests.reliability.kill_bucket --trials 250     # needs moto[server] and s3fs

As `kill_anywhere`, with checkpoint.folder at an S3 server on this machine. In each trial the server is slow,
throttles and fails, loses connections, refuses to write from some instant of the first run on, or does all but the
last. After the kill, the disk stays, is lost, or has a file damaged. A trial passes if

- of the steps that the killed run had said to be uploaded, the newest three (keep_latest_k) are whole in the
  bucket; of those that it had said to be complete, the newest three are whole on the disks or in the bucket,
- a run that ended by itself had been refused, and says so in a sentence,
- the next run continues from the newest step that is whole, on its disk or in the bucket, as judged here from
  files, objects and hashes alone. It repeats the unbroken run's numbers, and ends with its weights, optimizer and
  schedule, in each byte. It refuses to start if, and only if, there are damaged steps and no whole one,
- afterwards the bucket has the last three steps, whole, and no other.
"""

import os
import pickle
import random
import re
import shutil
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.utils._pytree import tree_flatten_with_path

from tests.reliability import jobs, kill_anywhere
from tests.reliability.kill_anywhere import (
    ASYNC,
    STEPS,
    TRAIN,
    Files,
    Trial,
    Variant,
    hashes_in,
    is_whole,
    newest_whole,
    steps_in,
)
from tests.reliability.s3_server import BUCKET, Server

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("sync", tuple(TRAIN)),
        Variant("async", (*TRAIN, *ASYNC)),
        Variant("async, 2 ranks", (*TRAIN, *ASYNC), 2),
        Variant("sync, 2 machines", tuple(TRAIN), 2),
        Variant("async, 2 machines", (*TRAIN, *ASYNC), 2),
    )
}
KEPT = 3  # checkpoint.keep_latest_k
SECONDS_TO_END = 1200  # the machine may be busy
WEATHERS = ("slow", "throttles", "hangs up", "refuses", "all")


def start(variant: Variant, folder: Path, bucket: str) -> jobs.Job:
    own = {}
    if "machines" in variant.name:  # each rank has a disk of its own
        own = {1: [f"--job.dump_folder={folder}/of_rank_1"]}
    arguments = [
        f"--job.dump_folder={folder}/outputs",
        f"--checkpoint.folder=s3://{BUCKET}/{bucket}",
    ]
    return jobs.start(
        [*variant.arguments, *arguments],
        folder / "logs",
        ranks=variant.ranks,
        arguments_of_rank=own,
    )


# ---- what is on disks and in the bucket, judged without the package ----


def steps_in_bucket(server: Server, bucket: str) -> dict[int, Files]:
    """Return step -> file name -> content."""
    steps: dict[int, Files] = {}
    for path, content in server.objects(f"{bucket}/").items():
        if match := re.match(r"step-(\d+)/(.+)", path):
            steps.setdefault(int(match[1]), {})[match[2]] = content
    return steps


def steps_on_disks(folder: Path) -> dict[int, Files]:
    """As `steps_in_bucket`, of the disks of all ranks."""
    steps = steps_in(folder / "of_rank_1")
    for step, files in steps_in(folder / "outputs").items():
        steps[step] = steps.get(step, {}) | files
    return steps


def numbers_in(pattern: str, text: str) -> set[int]:
    """Return the newest steps of which a run's output says so, of which no retention has removed one."""
    return {*sorted({int(number) for number in re.findall(pattern, text)})[-KEPT:]}


def state_of(files: Files) -> list[tuple[str, str]]:
    """Return (name, hash) of all that a step holds, but for the data position, which counts restarts, too."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, content in files.items():
            Path(folder, name).write_bytes(content)
        dcp_to_torch_save(folder, f"{folder}/all")
        everything = torch.load(f"{folder}/all", weights_only=False)
    del everything["dataloader"]
    leaves, _ = tree_flatten_with_path(everything)
    hashes = [(str(path), sha256(pickle.dumps(_plain(leaf))).hexdigest()) for path, leaf in leaves]
    return sorted(hashes)


def _plain(leaf: object) -> object:
    return leaf.numpy().tobytes() if isinstance(leaf, torch.Tensor) else leaf


def lost_by_kill(output: str, on_disks: dict, in_bucket: dict) -> str | None:
    uploaded = {step for step, files in in_bucket.items() if is_whole(files)}
    whole = uploaded | {step for step, files in on_disks.items() if is_whole(files)}
    if missing := numbers_in(r"/step-(\d+) was uploaded to", output) - uploaded:
        return f"steps {missing} were said to be uploaded, and whole there are {uploaded}"
    if missing := numbers_in(r"/step-(\d+) is complete", output) - whole:
        return f"steps {missing} were said to be complete, and whole are {whole}"
    return None


def ended_wrongly(first: jobs.Outcome, is_refused: bool) -> str | None:
    if -signal.SIGKILL in first.exit_codes or not any(first.exit_codes):
        return None
    if is_refused and "the store refuses" in first.output and "Traceback" not in first.output:
        return None
    return f"the first run ended with {first.exit_codes}\n{first.output}"


# ---- a trial ----


def faults(weather: str, rng: random.Random) -> Callable[[str, str], str | float | None]:
    kinds = {
        "throttles": ("throttles", "fails"),
        "hangs up": ("hangs up", "hangs up late"),
        "all": ("throttles", "fails", "hangs up", "hangs up late"),
    }.get(weather, ())
    writes_left = rng.randrange(70)  # a step takes about 8

    def fault(method: str, path: str) -> str | float | None:
        nonlocal writes_left
        writes_left -= method in ("PUT", "POST")
        if weather == "refuses" and writes_left < 0 and method in ("PUT", "POST"):
            return "refuses"
        if kinds and rng.random() < 0.1:
            return rng.choice(kinds)
        if weather in ("slow", "all") or method in ("PUT", "POST"):
            return rng.uniform(0, 0.2 if weather == "slow" else 0.05)
        return None

    return fault


def try_once(
    server: Server, name: str, seed: int, unbroken: "Unbroken", folder: Path, weather: str
) -> Trial:
    variant, rng = VARIANTS[name], random.Random(f"{name} {seed}")
    bucket, has_machines = f"trial-{seed}", "machines" in name
    server.fault, server.met = faults(weather, rng), Counter()
    job = start(variant, folder, bucket)
    first = kill_anywhere.kill(variant, job, folder, unbroken.seconds, rng)
    server.wait_until_idle()
    was_refused = server.met["refuses"] > 0
    if weather == "refuses":
        server.fault = faults("calm", rng)
    in_bucket, on_disks = steps_in_bucket(server, bucket), steps_on_disks(folder)
    failure = lost_by_kill(first.output, on_disks, in_bucket) or ended_wrongly(first, was_refused)
    damage = rng.choice([None, "lost", "damaged"])
    if damage == "lost":
        for disk in (folder / "outputs/checkpoint", folder / "of_rank_1"):
            shutil.rmtree(disk, ignore_errors=True)
    elif damage == "damaged":
        damage = kill_anywhere.damage_a_file(folder / "outputs", rng)
    on_disks = steps_on_disks(folder)
    # With a disk for each rank, none can read the files of the others: only the bucket counts.
    copies = (in_bucket,) if has_machines else (in_bucket, on_disks)
    newest = max((n for n in map(newest_whole, copies) if n is not None), default=None)
    own = steps_in(folder / "outputs").items()  # of rank 0
    finished = [on_disks[step] for step, files in own if kill_anywhere.is_finished(files)]
    if has_machines:  # what is spread over whole disks is not damaged, only out of reach
        finished = [f for f in finished if not (hashes_in(f) and hashes_in(f).keys() <= f.keys())]
    before = len(jobs.logged_steps(folder / "outputs"))
    again = start(variant, folder, bucket).wait(SECONDS_TO_END)
    server.wait_until_idle()
    after = steps_in_bucket(server, bucket)
    if failure is not None:
        pass
    elif newest is None and finished:
        failure = kill_anywhere.not_refused(again)
    else:
        rows = jobs.logged_steps(folder / "outputs")[before:]
        failure = kill_anywhere.not_repeated(variant, again, rows, unbroken.numbers, newest)
        whole = sorted(step for step, files in after.items() if is_whole(files))
        kept = [*range(STEPS - KEPT + 1, STEPS + 1)]
        if failure is None and (whole[-KEPT:] != kept or (newest != STEPS and [*after] != kept)):
            failure = f"whole in the bucket are {whole} of {sorted(after)}\n{again.output}"
        if failure is None and state_of(after[STEPS]) != unbroken.state:
            failure = "the last step's states differ from the unbroken run's"
    was_killed = -signal.SIGKILL in first.exit_codes
    trial = Trial(name, damage, newest, failure, was_killed, server.met)
    return kill_anywhere.ended(trial, folder)


class Unbroken(NamedTuple):
    """The run that is not killed: its numbers by step, the states in its last step, and how long it took."""

    numbers: dict[int, tuple]
    state: list[tuple[str, str]]
    seconds: float


def run_unbroken(server: Server, name: str, folder: Path, bucket: str) -> Unbroken:
    job = start(VARIANTS[name], folder, bucket).wait(SECONDS_TO_END)
    assert job.exit_codes == [0] * VARIANTS[name].ranks, job.output
    steps = steps_in_bucket(server, bucket)
    assert [*steps] == [6, 7, 8] and all(map(is_whole, steps.values())), job.output
    return Unbroken(
        dict(jobs.logged_steps(folder / "outputs")), state_of(steps[STEPS]), job.seconds
    )


def run_trials(names: list[str], n_trials: int, seed: int, folder: Path) -> list[Trial]:
    """Return the trials, dealt to variants and weathers in turn."""
    server = Server()
    os.environ |= server.environment | {"AWS_MAX_ATTEMPTS": "1"}  # botocore's own attempts
    unbroken, trials = {}, []
    for name in names:
        bucket = f"unbroken-{names.index(name)}"
        unbroken[name] = run_unbroken(server, name, folder / bucket, bucket)
        print(f"unbroken: {name}, {unbroken[name].seconds:.1f} s", flush=True)
    for number in range(n_trials):
        name, weather = names[number % len(names)], WEATHERS[number // len(names) % len(WEATHERS)]
        place = folder / f"trial-{number}"
        last = try_once(server, name, seed + number, unbroken[name], place, weather)
        trials.append(last)
        outcome = last.failure or f"passed, from {last.resumed_from} ({last.damage})"
        print(f"{number + 1}, {name}, {weather}: {outcome}", flush=True)
    server.close()
    return trials


if __name__ == "__main__":
    kill_anywhere.run_from_command_line(__doc__, VARIANTS, run_trials, trials=250)
