"""Computes metrics of episodes, and writes a run's metrics and episodes."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from statistics import fmean

import torch.distributed as dist

from torchtitan.callbacks.metrics import build_metrics_processor, memory_metrics
from torchtitan.engine import TrainingEngine
from torchtitan.rl.advantages import advantage_metrics
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.types import Episode
from torchtitan.tools.events import event
from torchtitan.tools.files import open_file
from torchtitan.tools.logging import logger


class MetricsWriter:
    """Writes a run's metrics and episodes, by the settings in `[metrics]` and `rl.log_samples`."""

    def __init__(self, job_config: JobConfig, engine: TrainingEngine):
        self._config = job_config
        self._processor = build_metrics_processor(
            job_config, engine.parallel_dims, engine.model_args
        )

    def step(
        self,
        step: int,
        metrics: dict[str, float],
        episodes: Sequence[Episode],
        num_updates: int = 1,
    ) -> None:
        """Write the metrics and episodes of the last `num_updates` steps, up to `step`."""
        path = os.path.join(self._config.job.dump_folder, "episodes.jsonl")
        append_episodes(path, step, episodes, self._config.rl.log_samples)
        processor, color = self._processor, self._processor.color
        if not any(map(processor.should_log, range(step + 1 - num_updates, step + 1))):
            return
        memory = memory_metrics(processor.device_memory_monitor.get_peak_stats())
        processor.logger.log(metrics | memory, step)
        seconds, last_step = metrics["time/step(s)"], self._config.training.steps
        scores = ["rl/reward", *(key for key in metrics if key.startswith("rl/reward/"))]
        fields = [f"{color.red}step: {step:2}/{last_step}"]
        # The loss is missing while only the critic learns.
        for key, form, before in [
            *((key, "6.3f", color.green) for key in (*scores, "rl/exact", "rl/completion_tokens")),
            ("loss", "8.5f", color.orange),
            ("grad_norm", "7.4f", ""),
            ("critic/value_loss", "8.5f", ""),
        ]:
            if key in metrics:
                name = key.removeprefix("rl/").removeprefix("critic/")
                fields.append(f"{before}{name}: {metrics[key]:{form}}")
        eta = timedelta(seconds=round((last_step - step) * seconds / num_updates))
        fields += [f"{color.blue}{seconds:.2f} s{color.reset}", f"eta: {eta}"]
        logger.info("  ".join(fields))

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Write the metrics of an evaluation after a step."""
        self._processor.logger.log(metrics, step)
        numbers = "  ".join(f"{name}: {value:.3f}" for name, value in metrics.items())
        logger.info("evaluation after step %d: %s", step, numbers, extra=event("validation", step))

    def close(self) -> None:
        """Finish writing. Safe to call twice."""
        self._processor.close()


def describe(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the metrics of a step's episodes, including metrics of their advantages."""
    return {
        **mean_scores(episodes),
        **advantage_metrics([e.advantage for e in episodes], [e.group_id for e in episodes]),
        "completion_tokens": fmean(sum(e.turn_lengths) for e in episodes),
        "stopped": fmean(e.finish_reason == "stop" for e in episodes),
    }


def staleness(episodes: Sequence[Episode], version: int) -> dict[str, float]:
    """Return metrics of the lag, the number of weight updates from an episode's oldest token to `version`."""
    counts = Counter(version - episode.policy_version for episode in episodes)
    return {
        "rl/lag": max(counts),
        "rl/lag_mean": sum(lag * count for lag, count in counts.items()) / counts.total(),
        "rl/versions_per_episode": fmean(episode.num_versions for episode in episodes),
        **{f"rl/episodes_by_lag/{lag}": count for lag, count in sorted(counts.items())},
    }


def mean_scores(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the mean reward, and the mean of each of the task's scores over the episodes that have it."""
    names = sorted({name for episode in episodes for name in episode.scores})
    means = {name: fmean(e.scores[name] for e in episodes if name in e.scores) for name in names}
    return means | {"reward": fmean(e.reward for e in episodes)}


def append_episodes(path: str, step: int, episodes: Sequence[Episode], limit: int = -1) -> None:
    """Append a step's first episodes to a file, one JSON object per line, on rank 0 only.

    A line has the step and the fields of `Episode`; `routed_experts` is null.
    limit: number of lines to append; -1 appends all.
    """
    if limit == 0 or (dist.is_initialized() and dist.get_rank() != 0):
        return
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open_file(path, "a", encoding="utf-8") as file:
        for episode in episodes if limit < 0 else episodes[:limit]:
            values = replace(episode, routed_experts=None).to_dict()
            file.write(json.dumps({"step": step, **values}) + "\n")
