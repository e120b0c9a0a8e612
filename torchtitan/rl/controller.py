"""The loop of RL: sample, grade, learn, give the new weights to the generator.

Under torchrun every rank runs this loop with the same episodes, so all ranks take the same
decisions; only `PolicyTrainer` and the weight update know the layout.
"""

import json
import time
from dataclasses import replace
from typing import Any

from torchtitan.config.checks import ConfigError
from torchtitan.distributed.stop import StopRequest
from torchtitan.listeners.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.rl.advantages import AdvantageEstimator
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.checks import check_rl_config
from torchtitan.rl.generator import BufferedGenerator, PolicyModel, build_generator
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.reference import ReferencePolicy
from torchtitan.rl.report import Reporter, describe, mean_scores, staleness
from torchtitan.rl.roles import GeneratorRank, RemoteDraws, RemoteGenerator, join_role, task_of_job
from torchtitan.rl.rollout import Draws, LostGeneratorError, Rollouts, with_advantages
from torchtitan.rl.tasks import Task
from torchtitan.rl.trainer import PolicyTrainer
from torchtitan.rl.types import Episode, TrainingBatch, TrainingSample
from torchtitan.rl.weight_sync import TakesWeights
from torchtitan.step.runner import on_error
from torchtitan.tools.logging import logger
from torchtitan.tools.utils import GarbageCollection
from torchtitan.trainer import load_newest_checkpoint, save_and_stop


def build_part(job_config: JobConfig, task: Task | None = None) -> "Controller | GeneratorRank":
    """This rank's part of the job: with `rl.generator.ranks` the last ranks only generate.

    task: in place of the one that the config names. Raises ConfigError as `Controller` does.
    """
    if not job_config.rl.generator.ranks:
        return Controller(job_config, task=task)
    check_rl_config(job_config)
    role = join_role(job_config)
    if role.generates:
        return GeneratorRank(job_config, role.link, role.first_generator, task)
    return Controller(
        job_config, task=task, remote=RemoteGenerator(role.link, role.first_generator)
    )


class Controller:
    """Trains a policy as its config says.

    task: in place of the one that the config names.
    remote: the ranks that generate, with `rl.generator.ranks`; see `build_part`.
    Raises ConfigError for a config that cannot run.
    """

    def __init__(
        self,
        job_config: JobConfig,
        *,
        task: Task | None = None,
        remote: RemoteGenerator | None = None,
    ):
        check_rl_config(job_config)
        self.job_config, self.config = job_config, job_config.rl
        if bool(self.config.generator.ranks) != (remote is not None):
            raise ConfigError(
                f"rl.generator.ranks = {self.config.generator.ranks} divides the job's ranks before "
                "there is a controller; start with torchtitan.rl.train, or rl.controller.build_part"
            )
        self.trainer = PolicyTrainer(job_config)
        engine = self.trainer.engine
        with on_error(engine.close):
            self.task = task = task_of_job(job_config, engine.train_spec, engine.model_args, task)
            self.generator: TakesWeights
            draws: Draws
            if remote is not None:
                remote.take_policy(PolicyModel.of_engine(engine))
                self.generator, draws = remote, RemoteDraws(remote)
            else:
                ahead = self.config.async_steps > 0
                try:
                    generator = build_generator(job_config, engine)
                except ImportError as error:
                    raise ConfigError(str(error)) from error
                self.generator = generator = BufferedGenerator(generator) if ahead else generator
                draws = Draws(task, generator, engine.device, ahead=ahead)
            self.rollouts = Rollouts(task, self.config, draws)
            self.advantages = AdvantageEstimator(**vars(self.config.advantage))
            self.batcher = Batcher.from_config(job_config, engine.dp_size)
            self.reporter = Reporter(job_config, engine)
            self.checkpointer = engine.checkpointer
            self.checkpointer.states["rl"] = self
            self.reference = None
            if self.config.loss.kl_coef > 0:
                self.reference = ReferencePolicy(self.trainer)
                self.checkpointer.states["rl_reference"] = self.reference
        debug = job_config.debug
        for key, is_set in {
            "training.global_batch_size": job_config.training.global_batch_size > 0,
            "validation.enable": job_config.validation.enable,
            "debug.check_document_isolation_freq": debug.check_document_isolation_freq > 0,
        }.items():
            if is_set:
                logger.warning("%s has no meaning in RL and is ignored; take it out", key)

    @property
    def step(self) -> int:
        """Steps done, including those before a resume."""
        return self.trainer.engine.step

    # ---- the loop ----

    def setup(self) -> bool:
        """Load the newest checkpoint, if any, and give the generator its weights.

        False if the run is complete already. Raises ValueError as `load_newest_checkpoint` does.
        """
        if not load_newest_checkpoint(self.trainer.engine):
            return False
        if self.reference is not None and not self.reference.is_loaded:
            if self.step > 0:
                logger.warning(
                    "the checkpoint of step %d came without rl_reference: the KL term compares "
                    "with the policy of this step",
                    self.step,
                )
            self.reference.take()
        self.rollouts.skip_to(self.step + 1)
        self.trainer.push_model_state_dict(self.generator)
        return True

    def train(self) -> None:
        """Load the newest checkpoint, if any, and train to `training.steps`.

        Raises LostGeneratorError if a rank that generates is gone, after what was learned is saved.
        """
        try:
            if self.setup():
                self._train()
        except LostGeneratorError as error:
            checkpoint = self.job_config.checkpoint
            if checkpoint.enable and not checkpoint.load_only and self.step > 0:
                save_and_stop(self.trainer.engine, str(error))
            raise

    def _train(self) -> None:
        config, last_step = self.job_config, self.job_config.training.steps
        if self.step == 0:
            self._evaluate_if_due()
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
                    self.train_step()
                    step, is_last = self.step, self.step == last_step
                    if not is_last and (reason := stop.answer()):
                        save_and_stop(self.trainer.engine, reason)
                        return
                    self._evaluate_if_due()
                    # Without a dataloader the checkpointer takes every step as due.
                    is_first = step == 1 and config.checkpoint.enable_first_step_checkpoint
                    if is_first or is_last or step % config.checkpoint.interval == 0:
                        started = time.monotonic()
                        self.checkpointer.save(step, last_step=is_last)
                        stop.saved(time.monotonic() - started)
                    for tool in (profiler, snapshot):
                        if tool is not None:
                            tool.step()
        finally:
            gc_handler.close()
        logger.info("training completed")

    def train_step(self) -> dict[str, float]:
        """Run one step and return what was logged.

        Raises RuntimeError for episodes that are older than `rl.async_steps` allows.
        """
        started = time.perf_counter()
        step, async_steps = self.step + 1, self.config.async_steps
        # As far ahead as the generator's weights may lag behind.
        self.rollouts.start_until(min(step + async_steps, self.job_config.training.steps))
        episodes = with_advantages(self.rollouts.take(step), self.advantages)
        lag = self.trainer.policy_version - min(e.policy_version for e in episodes)
        is_restored = step in self.rollouts.restored_steps
        if lag < 0 or (lag > async_steps and not is_restored):
            raise RuntimeError(
                f"step {step} got episodes that are {lag} weight updates old, and "
                f"rl.async_steps = {async_steps} allows no more than that"
            )
        measured: dict[str, float] = staleness(episodes, self.trainer.policy_version)
        generated = time.perf_counter()

        if self.reference is not None:
            episodes = self._with_reference(episodes)
        batch = self._batch(episodes)
        if self.config.generator.rescore:
            batch, measured["rl/rescore_diff_max"] = self.trainer.rescore(batch)
        output = self.trainer.forward_backward(batch)
        update = self.trainer.optim_step()
        trained = time.perf_counter()

        self.trainer.push_model_state_dict(self.generator)
        finished = time.perf_counter()
        metrics = {
            "loss": output.loss,
            **{f"loss/{name}": value for name, value in output.metrics.items()},
            "grad_norm": update.grad_norm,
            "lr": update.lr,
            **{f"rl/{name}": value for name, value in describe(episodes).items()},
            "rl/policy_version": self.trainer.policy_version,
            **measured,
            "time/generate(s)": generated - started,
            "time/train(s)": trained - generated,
            "time/update_generator(s)": finished - trained,
            "time/step(s)": finished - started,
        }
        self.reporter.step(self.step, metrics, episodes)
        return metrics

    def close(self) -> None:
        """Finish what is being drawn and written. Safe to call twice."""
        self.rollouts.close()
        self.reporter.close()
        self.trainer.close()

    def _batch(self, episodes: list[Episode]) -> TrainingBatch:
        return self.batcher.batch([TrainingSample.of_episode(episode) for episode in episodes])

    def _with_reference(self, episodes: list[Episode]) -> list[Episode]:
        """The episodes with log-probs under the policy that training began with."""
        with_logprobs = []
        scores = self.reference.logprobs(self._batch(episodes))
        for episode, values in zip(episodes, scores, strict=True):
            logprobs = episode.token_log_probs  # of one that fits no row, and is left out anyway
            if values is not None:
                logprobs = tuple(values[-len(episode.token_ids) :].tolist())
            with_logprobs.append(replace(episode, ref_logprobs=logprobs))
        return with_logprobs

    # ---- evaluation ----

    def evaluate(self, *, greedy: bool = True) -> dict[str, float]:
        """Mean reward and scores on the same `rl.eval_samples` held-out prompts each time.

        greedy: take the likeliest token; False samples as in training.
        """
        return mean_scores(self.rollouts.of_held_out(greedy=greedy))

    def _evaluate_if_due(self) -> None:
        every, is_last = self.config.eval_every, self.step == self.job_config.training.steps
        if every == 0 or (self.step % every != 0 and not is_last):
            return
        metrics: dict[str, float] = {}
        for kind, greedy in (("greedy", True), ("sampled", False)):
            scores = self.evaluate(greedy=greedy)
            metrics |= {f"eval/{kind}_{name}": value for name, value in scores.items()}
        self.reporter.evaluation(self.step, metrics)

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the engine's own state, as one JSON text. Collective."""
        rollouts = self.rollouts.state_dict()  # first: it may go back to earlier prompts
        return {"state": json.dumps({"task": self.task.state_dict(), "rollouts": rollouts})}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Raises ValueError if the checkpoint's state is not one of this task."""
        try:
            state = json.loads(state_dict["state"])
            self.task.load_state_dict(state["task"])
            self.rollouts.load_state_dict(state["rollouts"])
        except (AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ValueError(
                f"the state of the RL run in the checkpoint cannot be read ({type(error).__name__}: "
                f"{error}); resume with the task it was saved with"
            ) from error
