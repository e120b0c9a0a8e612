"""The loop of RL: sample, grade, learn, hand the new weights to the generator, again.

One process runs it by itself. Under torchrun every rank runs the same loop: completions are dealt
over all ranks and the episodes gathered on all of them, so every rank takes the same decisions;
only `PolicyTrainer` and the weight update know the layout.

What is drawn depends on `rl.seed`, the step and the place in it, not on which rank draws it or
when: a resumed run draws the same, and so does another layout.
"""

import json
import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import replace
from datetime import timedelta
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.components.metrics import build_metrics_processor, memory_metrics
from torchtitan.components.stop import StopRequest
from torchtitan.config.checks import ConfigError, check_tokenizer_fits
from torchtitan.engine import closed_on_error
from torchtitan.rl.advantages import AdvantageEstimator, advantage_metrics
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.generator import build_generator
from torchtitan.rl.job_config import JobConfig, batch_seq_len, check_rl_config
from torchtitan.rl.reference import ReferencePolicy
from torchtitan.rl.rollout import EpisodeLog, make_episodes, with_advantages
from torchtitan.rl.tasks import Prompt, Task, build_task
from torchtitan.rl.trainer import PolicyTrainer
from torchtitan.rl.types import Episode, SamplingConfig, samples_of
from torchtitan.tools.errors import RunError
from torchtitan.tools.events import event
from torchtitan.tools.logging import logger
from torchtitan.tools.profiling import maybe_enable_memory_snapshot, maybe_enable_profiling
from torchtitan.tools.utils import GarbageCollection, use_device
from torchtitan.trainer import load_newest_checkpoint, save_and_stop


class Controller:
    """Trains a policy as its config says.

    task: in place of the one that the config names.
    Raises ConfigError for a config that cannot run.
    """

    def __init__(self, job_config: JobConfig, *, task: Task | None = None):
        check_rl_config(job_config)
        self.job_config = job_config
        self.config = job_config.rl
        self.trainer = PolicyTrainer(job_config)
        with closed_on_error(self.trainer.engine):
            self._build(task)
            self._warn_of_unused_settings()

    def _build(self, task: Task | None) -> None:
        job_config, engine = self.job_config, self.trainer.engine
        if task is None:
            longest = batch_seq_len(job_config) + 1 - self.config.sampling.max_tokens
            task = build_task(self.config, self._tokenizer(), longest)
        self.task = task
        check_tokenizer_fits(self.task.tokenizer, engine.model_args)
        try:
            self.generator = build_generator(job_config, engine)
        except ImportError as error:
            raise ConfigError(str(error)) from error
        eos_id = self.task.tokenizer.eos_id
        self.sampling = SamplingConfig(
            temperature=self.config.sampling.temperature,
            top_p=self.config.sampling.top_p,
            top_k=self.config.sampling.top_k,
            max_tokens=self.config.sampling.max_tokens,
            stop_token_ids=() if eos_id is None else (eos_id,),
        )
        self.batcher = Batcher.from_config(job_config, engine.dp_size)
        self.advantages = AdvantageEstimator.of(self.config.advantage)
        self.rollouts = _Rollouts(
            self._sample_prompts, self._draw, self.config.async_steps, engine.device
        )
        self.metrics_processor = build_metrics_processor(
            job_config, engine.parallel_dims, engine.model_args
        )
        self.episode_log = EpisodeLog(
            os.path.join(job_config.job.dump_folder, "episodes.jsonl"), self.config.log_samples
        )
        engine.checkpointer.states["rl"] = self
        self.reference = None
        if self.config.loss.kl_coef > 0:
            self.reference = ReferencePolicy(self.trainer)
            engine.checkpointer.states["rl_reference"] = self.reference

    def _warn_of_unused_settings(self) -> None:
        config = self.job_config
        unused = {
            "training.global_batch_size": config.training.global_batch_size > 0,
            "validation.enable": config.validation.enable,
            "debug.check_document_isolation_freq": config.debug.check_document_isolation_freq > 0,
        }
        for key, is_set in unused.items():
            if is_set:
                logger.warning("%s has no meaning in RL and is ignored; take it out", key)

    def _tokenizer(self) -> Any:
        build = self.trainer.engine.train_spec.build_tokenizer_fn
        return None if build is None else build(self.job_config)

    @property
    def checkpointer(self) -> CheckpointManager:
        return self.trainer.engine.checkpointer

    @property
    def step(self) -> int:
        """Steps done, those before a resume included."""
        return self.trainer.engine.step

    # ---- the loop ----

    def train(self) -> None:
        """Load the newest checkpoint, if any, and train to `training.steps`."""
        if not self.setup():
            return
        last_step = self.job_config.training.steps
        if self.step == 0 and self._evaluates(self.step):
            self._evaluate_and_log()
        config = self.job_config
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
                    if self.step < last_step and (reason := stop.answer()):
                        save_and_stop(self.trainer.engine, reason)
                        return
                    if self._evaluates(self.step):
                        self._evaluate_and_log()
                    if self._saves(self.step):
                        started = time.monotonic()
                        self.checkpointer.save(self.step, last_step=self.step == last_step)
                        stop.saved(time.monotonic() - started)
                    for tool in (profiler, snapshot):
                        if tool is not None:
                            tool.step()
        finally:
            gc_handler.close()
        logger.info("training completed")

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
        self._update_generator()
        return True

    def train_step(self) -> dict[str, float]:
        """Run one step and return what was logged."""
        started = time.perf_counter()
        step = self.step + 1
        # As far ahead as the generator's weights may lag behind.
        last_step = self.job_config.training.steps
        self.rollouts.start_until(min(step + self.config.async_steps, last_step))
        episodes = with_advantages(self.rollouts.take(step), self.advantages)
        measured: dict[str, float] = {"rl/lag": self._lag(episodes)}
        generated = time.perf_counter()

        if self.reference is not None:
            episodes = self._with_reference(episodes)
        batch = self.batcher.batch(samples_of(episodes))
        if self.config.generator.rescore:
            batch, measured["rl/rescore_diff_max"] = self.trainer.rescore(batch)
        found = self.trainer.forward_backward(batch)
        done = self.trainer.optim_step()
        trained = time.perf_counter()

        self.rollouts.wait()  # whatever is being drawn now is drawn with the weights it began with
        self._update_generator()
        finished = time.perf_counter()
        metrics = {
            "loss": found.loss,
            **{f"loss/{name}": value for name, value in found.metrics.items()},
            "grad_norm": done.grad_norm,
            "lr": done.lr,
            **self._describe(episodes),
            **measured,
            "time/generate(s)": generated - started,
            "time/train(s)": trained - generated,
            "time/update_generator(s)": finished - trained,
            "time/step(s)": finished - started,
        }
        self._log(metrics, episodes)
        return metrics

    def _update_generator(self) -> None:
        self.trainer.push_model_state_dict(self.generator)

    def close(self) -> None:
        """Finish what is being drawn and written. Safe to call twice."""
        self.rollouts.close()
        self.episode_log.close()
        self.metrics_processor.close()
        self.trainer.close()

    def _saves(self, step: int) -> bool:
        """Whether a checkpoint is due; without a dataloader the manager leaves that to us."""
        config = self.job_config.checkpoint
        is_wanted_first = step == 1 and config.enable_first_step_checkpoint
        is_last = step == self.job_config.training.steps
        return is_wanted_first or is_last or step % config.interval == 0

    # ---- rollouts ----

    def _sample_prompts(self, step: int) -> list[Prompt]:
        return self.task.sample(self.config.num_prompts_per_step)

    def _draw(self, step: int, prompts: Sequence[Prompt]) -> list[Episode]:
        """This rank's share of a step's episodes, graded."""
        n = self.config.num_samples_per_prompt
        return self._complete(prompts, n, replace(self.sampling, seed=self._seed(step)))

    def _complete(
        self, prompts: Sequence[Prompt], num_samples: int, sampling: SamplingConfig
    ) -> list[Episode]:
        """Have prompts completed, and grade this rank's share.

        Graded where they are, as a reward function may be slow, or may not say the same twice.
        """
        own = _share_of_rank(range(len(prompts)))
        asked = range(len(prompts)) if self.generator.is_collective else own
        completions = self.generator.generate(
            [prompts[i].token_ids for i in asked],
            sampling,
            num_samples,
            first_row=asked.start * num_samples,
        )
        first = (own.start - asked.start) * num_samples
        return make_episodes(
            self.task,
            [prompts[i] for i in own],
            completions[first : first + len(own) * num_samples],
            first_group=own.start,
        )

    def _seed(self, *place: Any) -> int:
        return random.Random(" ".join(map(str, (self.config.seed, *place)))).getrandbits(63)

    def _lag(self, episodes: list[Episode]) -> int:
        """How many updates older than today's the weights are that drew the oldest episode.

        Raises RuntimeError if that is more than the config allows.
        """
        lag = self.trainer.policy_version - min(e.policy_version for e in episodes)
        if not 0 <= lag <= self.config.async_steps:
            raise RuntimeError(
                f"step {self.step + 1} got episodes that are {lag} weight updates old, and "
                f"rl.async_steps = {self.config.async_steps} allows no more than that"
            )
        return lag

    def _with_reference(self, episodes: list[Episode]) -> list[Episode]:
        """The episodes with log-probs under the policy that training began with."""
        scored = self.reference.logprobs(self.batcher.batch(samples_of(episodes)))

        def of_new_tokens(episode: Episode, values: Tensor | None) -> tuple[float, ...]:
            if values is None:  # it does not fit a row, and is left out of the loss
                return episode.token_log_probs
            return tuple(values[-len(episode.token_ids) :].tolist())

        return [
            replace(episode, ref_logprobs=of_new_tokens(episode, values))
            for episode, values in zip(episodes, scored, strict=True)
        ]

    # ---- evaluation ----

    def _evaluates(self, step: int) -> bool:
        every = self.config.eval_every
        return every > 0 and (step % every == 0 or step == self.job_config.training.steps)

    def evaluate(self, *, greedy: bool = True) -> dict[str, float]:
        """Mean reward and scores on `rl.eval_samples` held-out prompts, always the same ones.

        greedy: take the likeliest token; False samples as in training.
        """
        prompts = self.task.held_out(self.config.eval_samples)
        temperature = 0.0 if greedy else self.sampling.temperature
        sampling = replace(self.sampling, temperature=temperature, seed=self._seed("evaluation"))
        return _mean_scores(_gathered(lambda: self._complete(prompts, 1, sampling)))

    def _evaluate_and_log(self) -> None:
        metrics: dict[str, float] = {}
        for kind, greedy in (("greedy", True), ("sampled", False)):
            scores = self.evaluate(greedy=greedy)
            metrics |= {f"eval/{kind}_{name}": value for name, value in scores.items()}
        self.metrics_processor.logger.log(metrics, self.step)
        numbers = "  ".join(f"{name}: {value:.3f}" for name, value in metrics.items())
        logger.info(
            "evaluation after step %d: %s", self.step, numbers, extra=event("validation", self.step)
        )

    # ---- logs ----

    def _describe(self, episodes: list[Episode]) -> dict[str, float]:
        advantages = advantage_metrics(
            [episode.advantage for episode in episodes],
            [episode.group_id for episode in episodes],
        )
        metrics = {
            **_mean_scores(episodes),
            **advantages,
            "completion_tokens": fmean(len(e.token_ids) for e in episodes),
            "stopped": fmean(e.finish_reason == "stop" for e in episodes),
            "policy_version": self.trainer.policy_version,
        }
        return {f"rl/{name}": value for name, value in metrics.items()}

    def _log(self, metrics: dict[str, float], episodes: list[Episode]) -> None:
        self.episode_log.write(self.step, episodes)
        processor = self.metrics_processor
        if not processor.should_log(self.step):
            return
        memory = memory_metrics(processor.device_memory_monitor.get_peak_stats())
        processor.logger.log(metrics | memory, self.step)
        logger.info(self._progress_line(metrics))

    def _progress_line(self, metrics: dict[str, float]) -> str:
        color, last_step = self.metrics_processor.color, self.job_config.training.steps
        seconds = metrics["time/step(s)"]
        shown = {
            name.removeprefix("rl/"): value
            for name, value in metrics.items()
            if name in ("rl/reward", "rl/exact", "rl/completion_tokens")
        }
        return "  ".join(
            [
                f"{color.red}step: {self.step:2}/{last_step}",
                *(f"{color.green}{name}: {value:6.3f}" for name, value in shown.items()),
                f"{color.orange}loss: {metrics['loss']:8.5f}",
                f"grad_norm: {metrics['grad_norm']:7.4f}",
                f"{color.blue}{seconds:.2f} s{color.reset}",
                f"eta: {timedelta(seconds=round((last_step - self.step) * seconds))}",
            ]
        )

    # ---- state ----

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs besides the engine's own state, as one JSON text. Collective.

        Episodes that were drawn ahead are part of it: weights that drew them are gone by then.
        """
        state = {"task": self.task.state_dict(), "rollouts": self.rollouts.state_dict()}
        return {"state": json.dumps(state)}

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


class _Rollouts:
    """The episodes of coming steps; with `ahead` > 0 they are drawn on a thread of their own.

    sample: step -> what `draw` needs, called in the order of steps on the caller's thread.
    draw: (step, that) -> this rank's episodes.
    device: what it is drawn on.
    """

    def __init__(
        self,
        sample: Callable[[int], Any],
        draw: Callable[[int, Any], list[Episode]],
        ahead: int,
        device: torch.device,
    ):
        self._sample, self._draw = sample, draw
        self._thread = None
        if ahead:
            self._thread = ThreadPoolExecutor(
                1, "rollouts", initializer=use_device, initargs=(device,)
            )
        self._next_step = 1
        self._drawing: deque[tuple[int, Future]] = deque()
        self._gathered: deque[tuple[int, list[Episode]]] = deque()

    def skip_to(self, step: int) -> None:
        """Draw none before this step."""
        self._next_step = max(self._next_step, step)

    def start_until(self, last_step: int) -> None:
        """Begin to draw all steps up to this one that were not begun before."""
        while self._next_step <= last_step:
            step, given = self._next_step, self._sample(self._next_step)
            self._drawing.append((step, self._submit(step, given)))
            self._next_step += 1

    def _submit(self, step: int, given: Any) -> Future:
        if self._thread is not None:
            return self._thread.submit(self._draw, step, given)
        done: Future = Future()
        try:
            done.set_result(self._draw(step, given))
        except Exception as error:  # told to the other ranks where episodes are gathered
            done.set_exception(error)
        return done

    def take(self, step: int) -> list[Episode]:
        """The step's episodes of all ranks. Collective; steps are taken in order."""
        if not self._gathered:
            self._gather_oldest()
        taken, episodes = self._gathered.popleft()
        assert taken == step, f"step {step} was asked for and {taken} is next"
        return episodes

    def wait(self) -> None:
        """Return when nothing is being drawn; what failed is told where episodes are gathered."""
        wait([future for _, future in self._drawing])

    def _gather_oldest(self) -> None:
        step, future = self._drawing.popleft()
        self._gathered.append((step, _gathered(future.result)))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def state_dict(self) -> dict[str, Any]:
        while self._drawing:
            self._gather_oldest()
        pending = [[step, [e.to_dict() for e in episodes]] for step, episodes in self._gathered]
        return {"next_step": self._next_step, "pending": pending}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._next_step = state_dict["next_step"]
        self._drawing.clear()
        self._gathered = deque(
            (step, [Episode.from_dict(values) for values in episodes])
            for step, episodes in state_dict["pending"]
        )


def _rank_and_world_size() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _share_of_rank(indices: range) -> range:
    """A run of consecutive indices; those of all ranks in order are all of them."""
    rank, world_size = _rank_and_world_size()
    n = len(indices)
    return indices[n * rank // world_size : n * (rank + 1) // world_size]


def _gathered(draw: Callable[[], list[Episode]]) -> list[Episode]:
    """What `draw` returns on all ranks, in rank order.

    Raises on every rank if it raises on one, whose reward function may be to blame.
    """
    _, world_size = _rank_and_world_size()
    if world_size == 1:
        return draw()
    own: list[Episode] = []
    failure: Exception | None = None
    try:
        own = draw()
    except Exception as error:  # raised below, once the other ranks know
        failure = error
    parts: list[Any] = [None] * world_size
    dist.all_gather_object(parts, (own, None if failure is None else repr(failure)))
    if failure is not None:
        raise failure
    for other, (_, text) in enumerate(parts):
        if text is not None:
            raise RunError(f"rank {other} could not draw or grade its episodes: {text}")
    return [episode for part, _ in parts for episode in part]


def _mean_scores(episodes: list[Episode]) -> dict[str, float]:
    """Means of the reward and of everything else that the task measured."""
    names = sorted({name for episode in episodes for name in episode.scores})
    means = {name: fmean(e.scores.get(name, 0.0) for e in episodes) for name in names}
    return {"reward": fmean(e.reward for e in episodes), **means}
