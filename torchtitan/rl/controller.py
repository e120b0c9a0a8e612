"""The RL loop: sample, grade, train, send the new weights to the generator.

In `Rollouts` the generator completes the task's prompts, and the task grades the completions. The results
are `Episode`s. An `AdvantageEstimator` or a `Critic` computes advantages from rewards, a `Batcher` builds
the microbatches of all ranks, and a `PolicyTrainer` updates the weights, which are sent to the generator.

Under torchrun every rank runs this loop with the same episodes, so all ranks make the same decisions.
"""

import json
import time
from dataclasses import replace
from statistics import fmean
from typing import Any

from torchtitan.callbacks.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.checkpoint.run_record import record_of_task
from torchtitan.config.checks.common import value_of
from torchtitan.distributed.processes.stop import StopRequest
from torchtitan.engine import TrainingEngine
from torchtitan.job import resolve_job
from torchtitan.rl.advantages import AdvantageEstimator
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.checks import check_not_divided, check_rl_config
from torchtitan.rl.critic import Critic, critic_config
from torchtitan.rl.disaggregated import GeneratorRank, RemoteGenerator, join_role, task_of_job
from torchtitan.rl.generator import BufferedGenerator, PolicyModel, build_generator
from torchtitan.rl.job_config import JobConfig, longest_episode
from torchtitan.rl.losses import metrics_of_updates
from torchtitan.rl.metrics import MetricsWriter, describe, mean_scores, staleness
from torchtitan.rl.policy import PolicyTrainer, ReferencePolicy
from torchtitan.rl.rollout import (
    Draws,
    DrawsEpisodes,
    LostGeneratorError,
    Rollouts,
    with_advantages,
)
from torchtitan.rl.tasks import Task
from torchtitan.rl.types import Episode, OptimStepOutput, TrainingSample
from torchtitan.rl.weight_sync import TakesWeights
from torchtitan.step.runner import on_error
from torchtitan.tools.events import recorded
from torchtitan.tools.files import read_text
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection
from torchtitan.trainer import load_newest_checkpoint, save_and_stop


def build_part(job_config: JobConfig, task: Task | None = None) -> "Controller | GeneratorRank":
    """Build this rank's part of the job: the last `rl.generator.ranks` ranks get a `GeneratorRank`."""
    if not job_config.rl.generator.ranks:
        return Controller(job_config, task=task)
    # Check the config before the ranks split, so that every rank reports an error.
    job_config = _check(job_config)
    generates, link, n_trainers = join_role(job_config)
    if generates:
        return GeneratorRank(job_config, link, n_trainers, task)
    return Controller(job_config, task=task, remote=RemoteGenerator(link, n_trainers))


class Controller:
    """Trains a policy with RL.

    task: replaces the config's task. remote: the separate generating ranks, if `rl.generator.ranks` is set.
    Raises ConfigError for a config that cannot run.
    """

    def __init__(
        self,
        job_config: JobConfig,
        *,
        task: Task | None = None,
        remote: RemoteGenerator | None = None,
    ):
        if remote is None:
            check_not_divided(job_config)
        self.job_config = job_config = _check(job_config)
        self.config = job_config.rl
        self.updates_per_batch = self.config.epochs * self.config.minibatches
        self.num_batches = 0  # number of batches trained on; each takes `updates_per_batch` steps
        # With a remote generator the process group holds only the ranks that train.
        engine = TrainingEngine(job_config)
        with on_error(engine.close):
            self.task = task = task_of_job(job_config, engine.train_spec, engine.model_args, task)
            self.trainer = PolicyTrainer(job_config, engine=engine, tokenizer=task.tokenizer)
            self.generator: TakesWeights
            draws: DrawsEpisodes
            if remote is not None:
                remote.take_policy(PolicyModel.from_engine(engine))
                self.generator = draws = remote
            else:
                generator, ahead = build_generator(job_config, engine), self.config.async_steps > 0
                if ahead:
                    in_flight = self.config.generator.in_flight
                    generator = BufferedGenerator(generator, in_flight=in_flight)
                self.generator = generator
                draws = Draws(task, generator, engine.device, ahead=ahead)
            self.rollouts = Rollouts(task, self.config, draws, longest_episode(job_config))
            self.critic = Critic(job_config, engine) if job_config.has_critic else None
            # A critic computes advantages from the unchanged rewards.
            name = "none" if self.critic else self.config.advantage.name
            self.advantages = AdvantageEstimator(name, self.config.advantage.std)
            self.batcher = Batcher.from_config(job_config, engine.dp_size)
            self.reporter = MetricsWriter(job_config, engine)
            self.checkpointer = engine.checkpointer
            self.checkpointer.states["rl"] = self
            self.checkpointer.run_record |= record_of_task(self.config, task)
            if path := self.config.task.chat_template:
                self.checkpointer.chat_template = read_text(path)
            self.reference = ReferencePolicy(self.trainer) if self.config.loss.kl_coef > 0 else None
            if self.reference is not None and not self.reference.is_base:
                self.checkpointer.states["rl_reference"] = self.reference
            if self.critic is not None:
                self.checkpointer.states["rl_critic"] = self.critic
        keys = ("debug.check_document_isolation_freq", "validation.enable")
        for key in ("training.global_batch_size", *keys):
            if value_of(job_config, key) > 0:
                logger.warning("%s is ignored in RL; take it out", key)

    @property
    def step(self) -> int:
        """Number of optimizer steps done, including steps before a resume."""
        return self.trainer.engine.step

    # ---- the loop ----

    def setup(self) -> bool:
        """Load the newest checkpoint, if any, and send the weights to the generator.

        Returns False if the run is complete already.
        """
        if not load_newest_checkpoint(self.trainer.engine):
            return False
        # `num_batches` is 0 if the checkpoint has no state "rl".
        self.num_batches = self.num_batches or self.step
        if self.reference is not None and not self.reference.is_loaded:
            if self.step > 0:
                logger.warning(
                    f"the checkpoint of step {self.step} has no rl_reference: the KL term compares with "
                    "the policy of this step"
                )
            self.reference.take()
        if self.critic is not None:
            self.critic.begin()
        self.rollouts.skip_to(self.num_batches + 1)
        self.trainer.push_model_state_dict(self.generator)
        return True

    @recorded
    def train(self) -> None:
        """Load the newest checkpoint, if any, and train to `training.steps`.

        If a generating rank is lost, saves a checkpoint and raises LostGeneratorError. If episodes drawn
        ahead are lost with the rank, saves no checkpoint; then a resume uses the previous checkpoint.
        """
        try:
            if self.setup():
                self._train()
        except LostGeneratorError as error:
            checkpoint = self.job_config.checkpoint
            if checkpoint.enable and not checkpoint.load_only and self.step > 0:
                try:
                    save_and_stop(self.trainer.engine, str(error))
                except LostGeneratorError:
                    logger.warning(
                        f"step {self.step} is not saved, because episodes that were drawn ahead are lost; "
                        "the same command goes on from the newest checkpoint"
                    )
            raise

    def _train(self) -> None:
        config, last_step = self.job_config, self.job_config.training.steps
        if self.step == 0:
            self._evaluate_if_due(before=-1)
        gc_handler = GarbageCollection(config.training.gc_freq)
        profiling = dict(global_step=self.step, base_folder=config.job.dump_folder)
        try:
            with (
                maybe_enable_profiling(config.profiling, **profiling) as profiler,
                maybe_enable_memory_snapshot(config.profiling, **profiling) as snapshot,
                StopRequest(config) as stop,
            ):
                while self.step < last_step:
                    gc_handler.run(self.step + 1)
                    before = self.step
                    self.train_step()
                    step, is_last = self.step, self.step == last_step
                    if not is_last and (reason := stop.answer()):
                        save_and_stop(self.trainer.engine, reason)
                        return
                    self._evaluate_if_due(before)
                    started = time.monotonic()
                    self.checkpointer.save(step, last_step=is_last, since=before)
                    stop.saved(time.monotonic() - started)
                    for recorder in (profiler, snapshot):
                        if recorder is not None:
                            recorder.step()
        finally:
            gc_handler.close()
        logger.info("training completed")

    def train_step(self) -> dict[str, float]:
        """Train on one batch of episodes and return the logged metrics.

        Takes `rl.epochs * rl.minibatches` optimizer steps, or fewer if `training.steps` is
        reached. Raises RuntimeError for episodes older than `rl.async_steps` allows.
        """
        started = time.perf_counter()
        first_step, number = self.step + 1, self.num_batches + 1
        episodes = with_advantages(self._take(number), self.advantages)
        measured = staleness(episodes, self.trainer.policy_version)
        generated = time.perf_counter()

        if self.reference is not None:
            episodes = self._with_reference(episodes)
        samples = [TrainingSample.from_episode(episode) for episode in episodes]
        if self.critic is not None:
            rewards = [episode.reward for episode in episodes]
            samples, of_values = self.critic.with_advantages(samples, rewards)
            measured |= {f"critic/{name}": value for name, value in of_values.items()}
            means = [s.advantages[s.loss_mask != 0].mean().item() for s in samples]
            pairs = zip(episodes, means, strict=True)
            episodes = [replace(episode, advantage=mean) for episode, mean in pairs]
        updates = self._update(samples, measured)
        self.num_batches = number
        trained = time.perf_counter()

        self.trainer.push_model_state_dict(self.generator)
        finished = time.perf_counter()
        metrics = {}
        # There are no policy updates while only the critic learns.
        if updates:
            merged = metrics_of_updates([update.metrics for update in updates])
            metrics["loss"] = merged.pop("loss")
            # Leave out advantage metrics of the updates: `describe` computes them over all episodes.
            metrics |= {f"loss/{n}": x for n, x in merged.items() if not n.startswith("advantage_")}
            metrics["grad_norm"] = fmean(update.grad_norm for update in updates)
            metrics["lr"] = updates[-1].lr
        metrics |= {f"rl/{name}": value for name, value in describe(episodes).items()}
        metrics["rl/policy_version"] = self.trainer.policy_version
        metrics |= measured
        metrics["time/generate(s)"] = generated - started
        metrics["time/train(s)"] = trained - generated
        metrics["time/update_generator(s)"] = finished - trained
        metrics["time/step(s)"] = finished - started
        self.reporter.step(self.step, metrics, episodes, self.step + 1 - first_step)
        return metrics

    def _take(self, number: int) -> list[Episode]:
        """Return a batch's episodes; also start sampling up to `rl.async_steps` later batches."""
        steps_left = self.job_config.training.steps - self.step
        last = number - 1 + max(1, -(-steps_left // self.updates_per_batch))
        self.rollouts.start_until(min(number + self.config.async_steps, last))
        episodes = self.rollouts.take(number)
        lag = self.trainer.policy_version - min(e.policy_version for e in episodes)
        allowed = self.config.async_steps * self.updates_per_batch
        if lag < 0 or (lag > allowed and number not in self.rollouts.restored_steps):
            raise RuntimeError(
                f"step {self.step + 1} got episodes that are {lag} weight updates old, and "
                f"rl.async_steps = {self.config.async_steps} with {self.updates_per_batch} updates "
                f"per batch allows no more than {allowed}"
            )
        return episodes

    def _update(
        self, samples: list[TrainingSample], measured: dict[str, float]
    ) -> list[OptimStepOutput]:
        """Take the optimizer steps on a batch and return the steps' results; add metrics to `measured`."""
        # The completions of a prompt stay together, because advantages compare them.
        groups = list(dict.fromkeys(sample.group_id for sample in samples))
        n_parts = self.config.minibatches
        part_of = {group: ((i + 1) * n_parts - 1) // len(groups) for i, group in enumerate(groups)}
        parts: list[list[TrainingSample]] = [[] for _ in range(n_parts)]
        for sample in samples:
            parts[part_of[sample.group_id]].append(sample)
        batches = of_critic = [self.batcher.batch(part) for part in parts]
        if self.critic is not None and self.critic.batcher != self.batcher:
            of_critic = [self.critic.batcher.batch(part) for part in parts]
        measured["rl/slots_per_token"] = fmean(batch.slots_per_token for batch in batches)
        measured["rl/skipped_samples"] = sum(batch.num_skipped for batch in batches)
        # Rescore before the first update, to get log-probs of the policy at the start of the step.
        if self.config.generator.rescore:
            rescored = [self.trainer.rescore(batch) for batch in batches]
            batches = [batch for batch, _ in rescored]
            measured["rl/rescore_diff_max"] = max(difference for _, difference in rescored)
        if self.updates_per_batch > 1 and self.trainer.loss.corrects:
            batches = [self.trainer.with_old_logprobs(batch) for batch in batches]
        steps_left = self.job_config.training.steps - self.step
        updates, critic_updates = [], []
        pairs = list(zip(batches, of_critic, strict=True)) * self.config.epochs
        for batch, for_critic in pairs[: max(1, steps_left)]:
            if self.critic is not None:
                critic_updates.append(self.critic.update(for_critic))
            if self.step < self.config.critic.warmup_steps:
                self.trainer.skip_step()
                continue
            self.trainer.forward_backward(batch)
            updates.append(self.trainer.optim_step())
        if critic_updates:
            merged = metrics_of_updates(critic_updates)
            measured |= {f"critic/{name}": value for name, value in merged.items()}
        return updates

    def close(self) -> None:
        """Wait until sampling and pending writes are finished. Safe to call twice."""
        self.rollouts.close()
        self.reporter.close()
        self.trainer.close()
        if self.critic is not None:
            self.critic.close()

    def _with_reference(self, episodes: list[Episode]) -> list[Episode]:
        """Return the episodes with log-probs under the reference policy."""
        found = []
        samples = [TrainingSample.from_episode(episode) for episode in episodes]
        scores = self.reference.logprobs(self.batcher.batch(samples))
        for episode, values in zip(episodes, scores, strict=True):
            # An episode that fits no row keeps the generator's log-probs.
            logprobs = episode.token_log_probs
            if values is not None:
                logprobs = tuple(values[-len(episode.token_ids) :].tolist())
            found.append(replace(episode, ref_logprobs=logprobs))
        return found

    # ---- evaluation ----

    def evaluate(self, *, greedy: bool = True) -> dict[str, float]:
        """Return the mean reward and scores on `rl.eval_samples` held-out prompts, the same each time.

        greedy: take the most probable token; False samples as in training.
        """
        return mean_scores(self.rollouts.of_held_out(greedy=greedy))

    def _evaluate_if_due(self, before: int) -> None:
        """Evaluate every `rl.eval_every` steps. before: the step at the previous call."""
        every, is_last = self.config.eval_every, self.step == self.job_config.training.steps
        if not every or not (is_last or self.step // every > before // every):
            return
        metrics: dict[str, float] = {}
        for kind, greedy in (("greedy", True), ("sampled", False)):
            scores = self.evaluate(greedy=greedy)
            metrics |= {f"eval/{kind}_{name}": value for name, value in scores.items()}
        self.reporter.evaluation(self.step, metrics)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """Return the state that the engine does not save, as a JSON string. Collective."""
        state = {
            # Comes before `task.state_dict`, because this call may reset the task's state.
            "rollouts": self.rollouts.state_dict(),
            "task": self.task.state_dict(),
            "num_batches": self.num_batches,
        }
        return {"state": json.dumps(state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a `state_dict`; raises ValueError if it cannot be read."""
        try:
            state = json.loads(state_dict["state"])
            self.task.load_state_dict(state["task"])
            self.rollouts.load_state_dict(state["rollouts"])
            self.num_batches = state["num_batches"]
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                "the state of the RL run in the checkpoint cannot be read "
                f"({type(error).__name__}: {error}); resume with the task of the saved run"
            ) from error


def _check(job_config: JobConfig) -> JobConfig:
    """Return the resolved config; raises ConfigError if it cannot run, before anything is built."""
    check_rl_config(job_config)
    resolved = resolve_job(job_config, builds_data=False).config
    assert isinstance(resolved, JobConfig)
    if resolved.has_critic:
        critic_config(resolved)
    return resolved
