"""Kill runs at random instants, damage what they left, and see whether they resume.

    python -m tests.reliability.kill_anywhere --trials 500

A trial starts a run, sends SIGKILL at a random instant of it to all ranks, at once or shortly after one
another, damages a file of a checkpoint in two of five trials, and starts the run again. It passes if
that run

- continues from the newest step folder that is whole, as judged here from files and hashes alone,
- repeats loss and gradient norm of every later step of an unbroken run, bit for bit, and
- says so and stops, where no whole step is left but damaged ones are, instead of starting anew.

A run that uploads its checkpoints to a bucket, here a folder, may also lose its disk. Of the steps that it had
said to be uploaded, the newest three are whole there, and the second run leaves its last three steps there.

Of a job whose ranks have roles, one rank is killed (`--variants "RL, generating rank"` or `"RL, training
rank"`), and the other one has to end by itself. A server of policies (`--variants server "server, adapters"`)
is killed while a client trains and saves its state after each step. When it is started again, every
state that it had said to be saved continues as in the unbroken run.

Exit code 1 if a trial fails. Its folder is kept then.
"""

import dataclasses
import http.client
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from xxhash import xxh3_128

from tests.reliability import jobs
from tests.unit.integrations.tinker_server import Http

STEPS = 8
SECONDS_TO_END = 60
SAVING = jobs.flags_in(f"""
    checkpoint.enable checkpoint.interval=1 checkpoint.keep_latest_k=3 training.steps={STEPS}
    checkpoint.no_last_save_model_only metrics.enable_jsonl metrics.disable_color_printing
""")
TRAIN = [*jobs.TINY_JOB, *SAVING]
TOY = jobs.flags_in("""
    model.name=rl_toy training.mixed_precision_param=float32 activation_checkpoint.mode=none
    debug.seed=7
""")
RL = [*TOY, *SAVING] + jobs.flags_in("""
    training.seq_len=24 training.local_batch_size=4 lr_scheduler.warmup_steps=0 optimizer.lr=1e-3
    metrics.log_freq=1 rl.task.name=copy rl.sampling.max_tokens=4 rl.num_prompts_per_step=4
    rl.num_samples_per_prompt=4
""")
ASYNC = ["--checkpoint.async_mode=async"]
VALIDATION = jobs.flags_in(f"""
    validation.enable validation.dataset=local validation.freq=1 validation.steps=1
    validation.dataset_path={jobs.ROOT}/tests/assets/c4_test/data.json
    validation.local_batch_size=1 validation.seq_len=32
""")
EXPORT = ["--checkpoint.last_save_model_only", "--checkpoint.last_save_in_hf"]


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kind of run that is killed."""

    name: str
    arguments: tuple[str, ...]  # FOLDER stands for the trial's folder
    ranks: int = 1
    module: str = "torchtitan.train"
    killed: int | None = None  # the rank that is killed; None: all of them, and files are damaged


def _variants() -> list[Variant]:
    kinds = {
        "plain": (TRAIN, "torchtitan.train"),
        "validation": ([*TRAIN, *VALIDATION], "torchtitan.train"),
        "data workers": ([*TRAIN, "--training.dataloader.num_workers=1"], "torchtitan.train"),
        "export": ([*TRAIN, *EXPORT], "torchtitan.train"),
        "bucket": ([*TRAIN, "--checkpoint.folder=file://FOLDER/bucket"], "torchtitan.train"),
        "RL": (RL, "torchtitan.rl.train"),
    }
    # Only a time limit ends the wait for a rank that was killed before it met the other one.
    roles = (*RL, "--rl.generator.ranks=1", "--rl.async_steps=2", "--comm.init_timeout_seconds=30")
    serve = (*TOY, "--training.seq_len=16", "--rl.serve.port=0")
    adapters = ("--model.converters=lora", "--lora.rank=8")
    return [
        Variant("RL, generating rank", roles, 2, "torchtitan.rl.train", killed=1),
        Variant("RL, training rank", roles, 2, "torchtitan.rl.train", killed=0),
        Variant("server", serve, module="torchtitan.rl.serve"),
        Variant("server, adapters", (*serve, *adapters), module="torchtitan.rl.serve"),
    ] + [
        Variant(f"{kind}, {mode}, {ranks} rank{'s'[: ranks - 1]}", (*arguments, *extra), ranks, of)
        for kind, (arguments, of) in kinds.items()
        for mode, extra in (("sync", ()), ("async", ASYNC))
        for ranks in ((1,) if kind == "data workers" else (1, 2))
    ]


VARIANTS = {variant.name: variant for variant in _variants()}


class Trial(NamedTuple):
    """What was done to one run, and `failure`: what went wrong afterwards, if anything."""

    variant: str
    damage: str | None
    resumed_from: int | None  # None: there was no whole step, and the run began or stopped
    failure: str | None


# ---- the unbroken run ----


def start(variant: Variant, folder: Path) -> jobs.Job:
    arguments = [*variant.arguments, "--job.dump_folder=FOLDER/outputs"]
    arguments = [argument.replace("FOLDER", str(folder)) for argument in arguments]
    return jobs.start(arguments, folder / "logs", module=variant.module, ranks=variant.ranks)


def unbroken(variant: Variant, folder: Path) -> tuple[dict[int, tuple], float]:
    """Numbers of each step, and how long the run took."""
    if variant.module == "torchtitan.rl.serve":
        job, url = serve(variant, folder)
        started = time.monotonic()
        numbers = {step: of_step for step, of_step, _ in train_over(Run(url).start())}
        job.kill()
        return numbers, time.monotonic() - started
    outcome = start(variant, folder).wait(SECONDS_TO_END)
    assert outcome.exit_codes == [0] * variant.ranks, outcome.output
    numbers = dict(jobs.logged_steps(folder / "outputs"))
    assert sorted(numbers) == list(range(1, STEPS + 1)), outcome.output
    return numbers, outcome.seconds


# ---- what is on disk, judged without the package ----

Files = dict[str, bytes]  # name -> content


def steps_in(folder: Path) -> dict[int, Files]:
    """Return step -> its files."""
    steps: dict[int, Files] = {}
    for own in folder.glob("step-*"):
        files = (path for path in own.rglob("*") if path.is_file())
        step = int(own.name.removeprefix("step-"))
        steps[step] = {str(path.relative_to(own)): path.read_bytes() for path in files}
    return steps


def is_finished(files: Files) -> bool:
    """Whether the save ended, whatever became of the files since."""
    return bool(files) and ".incomplete" not in files


def hashes_in(files: Files) -> dict[str, str]:
    """Return file name -> hash; empty if there is no whole file of hashes."""
    text = files.get(".xxh128sums", b"").decode(errors="replace")
    entries = re.findall(r"^([0-9a-f]{32})  (.+)$", text, re.MULTILINE)
    if not text.startswith(f"# {len(entries)} files\n"):
        return {}
    return {name: digest for digest, name in entries}


def is_whole(files: Files, needs_hashes: bool = True) -> bool:
    """needs_hashes: False for a step as other tools write it, too."""
    hashes = hashes_in(files)
    if not needs_hashes and ".xxh128sums" not in files:
        hashes = dict.fromkeys(files, "")  # nothing else is damaged then
    elif any(xxh3_128(files.get(name, b"?")).hexdigest() != hashes[name] for name in hashes):
        return False
    has_weights = any(name == ".metadata" or name.endswith(".safetensors") for name in hashes)
    return ".incomplete" not in files and has_weights


def damage_a_file(folder: Path, rng: random.Random) -> str | None:
    """Truncate, flip a bit of, or delete a random file of one of the two newest finished steps."""
    steps = steps_in(folder)
    finished = sorted(step for step, files in steps.items() if is_finished(files))
    if not finished:
        return None
    step = rng.choice(finished[-2:])
    name, content = rng.choice(sorted(steps[step].items()))
    path = folder / f"step-{step}/{name}"
    how = rng.choice(["truncated", "bit flipped", "deleted"])
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: rng.randrange(max(len(content), 1))])
    elif content:
        place = rng.randrange(len(content))
        flipped = bytes([content[place] ^ 1 << rng.randrange(8)])
        path.write_bytes(content[:place] + flipped + content[place + 1 :])
    return f"step {step}: {name} {how}"


# ---- a trial ----


def kill(variant: Variant, job: jobs.Job, folder: Path, seconds: float, rng: random.Random):
    """Kill a run of so many seconds at a random instant; return its outcome.

    The instant is in a random step and not drawn by the clock: on a busy machine most runs would be
    killed before their first save. One in nine is.
    """
    step = rng.randrange(STEPS + 1)
    awaited = folder / f"outputs/checkpoint/step-{step}"
    while step and job.is_running() and not awaited.exists():
        time.sleep(0.002)
    time.sleep(rng.uniform(0, 1.5) * seconds / (2 * STEPS if step else 3))
    at_once = rng.random() < 0.5
    ranks = range(variant.ranks) if variant.killed is None else [variant.killed]
    for rank in rng.sample(ranks, len(ranks)):
        job.send(signal.SIGKILL, rank)
        time.sleep(0 if at_once else rng.uniform(0, 0.5))
    return job.wait(SECONDS_TO_END)


def try_once(
    name: str, seed: int, expected: dict[int, tuple], seconds: float, folder: Path
) -> Trial:
    variant, rng = VARIANTS[name], random.Random(f"{name} {seed}")
    if variant.module == "torchtitan.rl.serve":
        return kill_server(variant, expected, rng.uniform(0, seconds), folder)
    outputs, disk, bucket = folder / "outputs", folder / "outputs/checkpoint", folder / "bucket"
    first = kill(variant, start(variant, folder), folder, seconds, rng)
    damages = variant.killed is None and rng.random() < 0.4
    damage = damage_a_file(disk, rng) if damages else None
    in_bucket, has_bucket = steps_in(bucket), name.startswith("bucket")
    if has_bucket and rng.random() < 0.3:
        shutil.rmtree(disk, ignore_errors=True)
        damage = "the disk was lost"
    steps, before = steps_in(disk), len(jobs.logged_steps(outputs))
    # What is at an address needs its hashes.
    copies = [*steps.items(), *in_bucket.items()]
    whole = max((n for n, files in copies if is_whole(files, has_bucket)), default=None)
    again = start(variant, folder).wait(SECONDS_TO_END)
    uploaded = sorted(map(int, re.findall(r"/step-(\d+) was uploaded to", first.output)))[-3:]
    if None in first.exit_codes:
        failure = f"a rank hung after another was killed: {first.exit_codes}\n{first.output}"
    elif not all(is_whole(in_bucket.get(step, {})) for step in uploaded):
        failure = f"steps {uploaded} were said to be uploaded, and are not whole there"
    elif whole is None and any(map(is_finished, steps.values())):
        failure = not_refused(again)
    else:
        new_rows = jobs.logged_steps(outputs)[before:]
        failure = not_repeated(variant, again, new_rows, expected, whole)
        after = steps_in(bucket)
        if has_bucket and not all(is_whole(after.get(STEPS - n, {})) for n in range(3)):
            failure = failure or f"of {sorted(after)} in the bucket, the last three are not whole"
    return ended(Trial(name, damage, whole, failure), folder)


def ended(trial: Trial, folder: Path) -> Trial:
    if trial.failure is None:
        shutil.rmtree(folder)
    else:
        (folder / "failure").write_text(f"{trial.failure}\n{trial.damage}\n")
    return trial


def not_refused(again: jobs.Outcome) -> str | None:
    if all(again.exit_codes) and "damaged" in again.output and "Traceback" not in again.output:
        return None
    return f"every checkpoint is damaged, and the run went on: {again.exit_codes}\n{again.output}"


def not_repeated(
    variant: Variant,
    again: jobs.Outcome,
    new_rows: list[tuple[int, tuple]],
    expected: dict[int, tuple],
    whole: int | None,
) -> str | None:
    if again.exit_codes != [0] * variant.ranks:
        return f"the second run ended with {again.exit_codes}\n{again.output}"
    first = (whole or 0) + 1
    steps = [step for step, _ in new_rows]
    if steps != list(range(first, STEPS + 1)):
        return f"steps {steps} followed, not {first} to {STEPS}\n{again.output}"
    wrong = [step for step, numbers in new_rows if numbers != expected[step]]
    return f"other numbers at steps {wrong}" if wrong else None


# ---- a trial of the server ----


class Run(Http):
    """A client's training, whose adapters begin with the same numbers each time."""

    def start(self, state: str | None = None) -> "Run":
        """Begin with new weights, or with a saved state."""
        self.session = self.ask("create_session", tags=[], sdk_version="0")["session_id"]
        beginning = {"session_id": self.session, "model_seq_id": 0}
        if state is None:
            lora = {"rank": 8, "seed": 1}
            begun = self.wait("create_model", **beginning, base_model="any", lora_config=lora)
        else:
            begun = self.wait("load_weights", **beginning, path=state, optimizer=True)
        self.model = begun["model_id"]
        return self

    def finish(self) -> None:
        self.ask(f"sessions/{self.session}/finish", reason={"type": "success"})


def train_over(run: Run, first: int = 1) -> Iterator[tuple[int, tuple, str]]:
    """Yield (step, its numbers, the name of its saved state) after each step of a client."""
    for step in range(first, STEPS + 1):
        tokens = [1 + (step * n) % 30 for n in range(1, 9)]
        data = [(tokens[:-1], {"target_tokens": tokens[1:], "weights": [1.0] * 7})]
        loss = run.forward_backward(data)["metrics"]["loss:sum"]
        norm = run.optim_step()["metrics"]["grad_norm"]
        yield step, (loss, norm), run.train("save_weights", path=f"step-{step}")["path"]


def serve(variant: Variant, folder: Path) -> tuple[jobs.Job, str]:
    """Start a server; returns its job and its URL."""
    (folder / "logs/rank_0.log").unlink(missing_ok=True)  # has the URL of the server before
    job, line = start(variant, folder), r"serving policy at (http://[\d.]+:\d+)\n"
    jobs.wait_until(lambda: re.search(line, job.output()), job, SECONDS_TO_END)
    return job, re.search(line, job.output())[1]


def kill_server(
    variant: Variant, expected: dict[int, tuple], after_seconds: float, folder: Path
) -> Trial:
    job, url = serve(variant, folder)
    timer = threading.Timer(after_seconds, job.send, (signal.SIGKILL,))
    timer.start()
    saved: dict[int, str] = {}  # what the server has said to be saved
    try:
        for step, _, state in train_over(Run(url).start()):
            saved[step] = state
    except (OSError, http.client.HTTPException):
        pass
    timer.join()
    job.wait(SECONDS_TO_END)
    job, url = serve(variant, folder)
    failure = None
    try:
        for step, state in [*saved.items()] or [(0, None)]:
            run = Run(url).start(state)
            for later, numbers, _ in train_over(run, step + 1):
                if numbers != expected[later]:
                    failure = f"other numbers at step {later} after the state of step {step}"
            run.finish()
    except AssertionError as error:  # the server's answer to a request that it should carry out
        failure = f"a saved state of {saved} cannot be used: {error}"
    job.kill()
    last = max(saved, default=None)
    return ended(Trial(variant.name, None, last, failure), folder)


# ---- all trials ----


def run_trials(names: list[str], n_trials: int, seed: int, folder: Path) -> list[Trial]:
    """The trials, dealt to the variants in turn."""
    finished = {}
    for number, name in enumerate(names):
        finished[name] = unbroken(VARIANTS[name], folder / f"unbroken-{number}")
        print(f"unbroken: {name}, {finished[name][1]:.1f} s", flush=True)
    trials = []
    for number in range(n_trials):
        name = names[number % len(names)]
        trials.append(try_once(name, seed + number, *finished[name], folder / f"trial-{number}"))
        print(f"{number + 1} of {n_trials}: {trials[-1].failure or 'passed'}", flush=True)
    return trials


def summarize(trials: list[Trial]) -> str:
    lines = ["| runs | trials | damaged | began again or refused | resumed as they must |"]
    lines += ["|---|---|---|---|---|"]
    for name in [*sorted({trial.variant for trial in trials}), "all"]:
        group = [trial for trial in trials if name in (trial.variant, "all")]
        damaged = sum(trial.damage is not None for trial in group)
        without = sum(trial.resumed_from is None for trial in group)
        passed = sum(trial.failure is None for trial in group)
        lines.append(f"| {name} | {len(group)} | {damaged} | {without} | {passed} |")
    return "\n".join(lines)


def main() -> None:
    options = jobs.options_of(__doc__, trials=500, variants=[*VARIANTS])
    folder = Path(tempfile.mkdtemp(prefix="kills_"))
    trials = run_trials(options.variants, options.trials, options.seed, folder)
    print(summarize(trials))
    if any(trial.failure for trial in trials):
        print(f"what the failed trials left is in {folder}")
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
