"""Kill runs that save to a bucket at random instants, lose or damage their disks, and see how they resume.

    python -m tests.reliability.kill_bucket --trials 200     # needs moto[server] and s3fs

As `kill_anywhere`, with checkpoint.folder at an S3 server on this machine, which answers slowly, throttles and
hangs up now and then. After the kill, the disk stays, is lost, or has a file damaged. A trial passes if

- every step that the killed run had said to be uploaded is whole in the bucket, or a later one is,
- the next run continues from the newest step that is whole, on its disk or in the bucket, as judged here from
  files, objects and hashes alone, and repeats the numbers of an unbroken run bit for bit,
- afterwards the bucket's last step is whole.
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from hashlib import sha256
from pathlib import Path

from tests.reliability import jobs, kill_anywhere
from tests.reliability.kill_anywhere import ASYNC, STEPS, TRAIN, Trial, Variant
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
SECONDS_TO_END = 120


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


def is_whole(files: dict[str, bytes]) -> bool:
    text = files.get(".sha256sums", b"").decode(errors="replace")
    entries = re.findall(r"^([0-9a-f]{64})  (.+)$", text, re.MULTILINE)
    if ".incomplete" in files or not entries or not text.startswith(f"# {len(entries)} files\n"):
        return False
    return all(sha256(files.get(name, b"?")).hexdigest() == digest for digest, name in entries)


def steps_in(server: Server, bucket: str) -> dict[int, bool]:
    """Return step -> whether it is whole in the bucket."""
    steps: dict[int, dict[str, bytes]] = {}
    for path, content in server.objects(f"{bucket}/").items():
        if match := re.match(r"step-(\d+)/(.+)", path):
            steps.setdefault(int(match[1]), {})[match[2]] = content
    return {step: is_whole(files) for step, files in steps.items()}


def newest_on_disk(folder: Path) -> int | None:
    steps = kill_anywhere.step_folders(folder)
    whole = [s for s in steps if kill_anywhere.is_whole(s) and (s / ".sha256sums").exists()]
    return int(whole[0].name.removeprefix("step-")) if whole else None


def faults(rng: random.Random) -> object:
    def fault(method: str, path: str) -> str | float | None:
        if rng.random() < 0.05:
            return rng.choice(["throttles", "fails", *(["hangs up"] if method == "GET" else [])])
        return rng.uniform(0, 0.1) if method in ("PUT", "POST") else None

    return fault


def try_once(
    server: Server, name: str, seed: int, expected: dict[int, tuple], seconds: float, folder: Path
) -> Trial:
    variant, rng = VARIANTS[name], random.Random(f"{name} {seed}")
    bucket = f"trial-{seed}"
    server.fault = faults(rng)
    job = start(variant, folder, bucket)
    instant = kill_anywhere.sleep_until_an_instant(job, folder, seconds, rng)
    for rank in rng.sample(range(variant.ranks), variant.ranks):
        job.send(signal.SIGKILL, rank)
        time.sleep(rng.choice([0, rng.uniform(0, 0.3)]))
    first = job.wait(SECONDS_TO_END)
    said = [int(n) for n in re.findall(r"/step-(\d+) was uploaded to", first.output)]
    time.sleep(0.3)  # requests on their way
    in_bucket = steps_in(server, bucket)
    damage = rng.choice([None, "lost", "damaged"])
    if damage == "lost":
        for disk in (folder / "outputs/checkpoint", folder / "of_rank_1"):
            shutil.rmtree(disk, ignore_errors=True)
    elif damage == "damaged":
        damage = kill_anywhere.damage_a_file(folder, rng)
    has_machines = "machines" in name  # what is on one disk alone counts only once it is uploaded
    on_disk = None if has_machines else newest_on_disk(folder)
    uploaded = max((step for step, whole in in_bucket.items() if whole), default=None)
    newest = max((step for step in (on_disk, uploaded) if step is not None), default=None)
    only_damaged = newest is None and any(
        map(kill_anywhere.is_finished, kill_anywhere.step_folders(folder))
    )
    before = len(jobs.logged_steps(folder / "outputs"))
    again = start(variant, folder, bucket).wait(SECONDS_TO_END)
    after = steps_in(server, bucket)
    if said and (uploaded or 0) < max(said):
        failure = f"steps {said} were said to be uploaded, and whole there is {uploaded}"
    elif only_damaged and not has_machines:
        failure = kill_anywhere._not_refused(again)
    else:
        rows = jobs.logged_steps(folder / "outputs")[before:]
        failure = kill_anywhere._not_repeated(variant, again, rows, expected, newest)
        if failure is None and not after.get(STEPS):
            failure = f"the last step is not whole in the bucket: {after}\n{again.output}"
        if only_damaged and damage and kill_anywhere._not_refused(again) is None:
            failure = None  # a disk with damage that no other copy mends may be refused
    trial = Trial(name, seed, instant, damage, newest, failure)
    return kill_anywhere._ended(trial, folder)


def run_trials(names: list[str], n_trials: int, seed: int, folder: Path) -> list[Trial]:
    server = Server()
    os.environ |= server.environment
    finished, trials = {}, []
    for number, name in enumerate(names):
        place = folder / f"unbroken-{number}"
        job = start(VARIANTS[name], place, f"unbroken-{number}").wait(SECONDS_TO_END)
        assert job.exit_codes == [0] * VARIANTS[name].ranks, job.output
        assert steps_in(server, f"unbroken-{number}") == {6: True, 7: True, 8: True}, job.output
        finished[name] = dict(jobs.logged_steps(place / "outputs")), job.seconds
        print(f"unbroken: {name}, {job.seconds:.1f} s", flush=True)
    for number in range(n_trials):
        name, place = names[number % len(names)], folder / f"trial-{number}"
        trials.append(try_once(server, name, seed + number, *finished[name], place))
        last = trials[-1]
        outcome = last.failure or f"passed, from {last.resumed_from} ({last.damage})"
        print(f"{number + 1} of {n_trials}, {name}: {outcome}", flush=True)
    server.close()
    return trials


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS), choices=list(VARIANTS))
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kill_bucket_"))
    trials = run_trials(options.variants, options.trials, options.seed, folder)
    print(kill_anywhere.summarize(trials))
    if any(trial.failure for trial in trials):
        print(f"what the failed trials left is in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
