"""Metrics of a training run, and their destinations: console, TensorBoard, W&B, JSONL."""

import json
import math
import os
import platform
import sys
import time
from collections import namedtuple
from datetime import datetime, timedelta
from typing import Any

import torch

from torchtitan.config import JobConfig
from torchtitan.config.pipeline_layout import rank_of_last_stage
from torchtitan.distributed import ParallelDims
from torchtitan.optim.lr_scheduler import LRSchedulersContainer
from torchtitan.optim.optimizer import OptimizersContainer
from torchtitan.protocols.model import BaseModelArgs
from torchtitan.tools import utils
from torchtitan.tools.events import event
from torchtitan.tools.files import open_file
from torchtitan.tools.host import resident_bytes, total_ram_bytes
from torchtitan.tools.logging import logger

_GIB = 2**30

DeviceMemStats = namedtuple(
    "DeviceMemStats",
    "max_active_gib max_active_pct max_reserved_gib max_reserved_pct num_alloc_retries num_ooms",
)


class DeviceMemoryMonitor:
    """Reads the device's peak memory since the last reset.

    device: e.g. "cuda:0"; None is the current device. On a CPU, "active" is this process's current
    resident memory, "reserved" its peak since the start, and the capacity is the machine's RAM.
    """

    def __init__(self, device: str | None = None) -> None:
        self.device = torch.device(device or utils.get_device_type())
        self.device_index = 0
        if self.device.type == "cpu":
            self.device_name = platform.processor() or platform.machine()
            self.device_capacity = total_ram_bytes()
        else:
            module = torch.get_device_module(self.device)
            index = self.device.index
            self.device_index = module.current_device() if index is None else index
            self.device_name = module.get_device_name(self.device)
            self.device_capacity = module.get_device_properties(self.device).total_memory
            module.empty_cache()
        self.device_capacity_gib = self.device_capacity / _GIB
        self.reset_peak_stats()

    def get_peak_stats(self) -> DeviceMemStats:
        """Return the peaks since `reset_peak_stats`, in GiB (2**30 bytes) and % of the capacity."""
        if self.device.type == "cpu":
            (active, reserved), num_retries, num_ooms = resident_bytes(), 0, 0
        else:
            stats = torch.get_device_module(self.device).memory_stats(self.device)
            active = stats.get("active_bytes.all.peak", -1)
            reserved = stats.get("reserved_bytes.all.peak", -1)
            num_retries, num_ooms = stats.get("num_alloc_retries", -1), stats.get("num_ooms", -1)
        if num_retries > 0:
            logger.warning("Memory is scarce: the allocator had to retry %d times", num_retries)
        if num_ooms > 0:
            logger.warning("The device ran out of memory %d times", num_ooms)
        capacity = self.device_capacity or math.inf  # if the capacity is unknown, report 0 %
        sizes = active / _GIB, 100 * active / capacity, reserved / _GIB, 100 * reserved / capacity
        return DeviceMemStats(*sizes, num_retries, num_ooms)

    def reset_peak_stats(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).reset_peak_memory_stats(self.device)


def build_device_memory_monitor() -> DeviceMemoryMonitor:
    """Return a monitor of the current device, after logging its name and capacity."""
    monitor = DeviceMemoryMonitor()
    device = f"{monitor.device} ({monitor.device_name})"
    threads = f", {torch.get_num_threads()} threads" if monitor.device.type == "cpu" else ""
    logger.info("Device %s has %.2f GiB of memory%s", device, monitor.device_capacity_gib, threads)
    return monitor


class BaseLogger:
    """A logger that discards all metrics; the base class of the other loggers."""

    def log(self, metrics: dict[str, Any], step: int) -> None:
        pass

    def close(self) -> None:
        pass


class TensorBoardLogger(BaseLogger):
    """Writes scalars named `key`, or `tag/key` with a tag, for TensorBoard."""

    def __init__(self, log_dir: str, tag: str | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and often not needed

        self.tag = tag
        self.writer = SummaryWriter(log_dir, max_queue=1000)
        logger.info("TensorBoard files go to %s", log_dir)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for key, value in metrics.items():
            self.writer.add_scalar(_tagged(self.tag, key), value, step)

    def close(self) -> None:
        self.writer.close()


class WandBLogger(BaseLogger):
    """Sends metrics to Weights & Biases; the environment variables WANDB_* choose the run."""

    def __init__(self, log_dir: str, job_config: JobConfig, tag: str | None = None) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ImportError(
                "metrics.enable_wandb needs wandb: pip install torchtitan-embeddable[wandb]"
            ) from error

        self.wandb = wandb
        self.tag = tag
        os.makedirs(log_dir, exist_ok=True)
        options = {key: f"RUN_{key.upper()}" for key in "name id notes group job_type".split()}
        options |= {"entity": "TEAM", "resume_from": "RESUME_FROM", "fork_from": "FORK_FROM"}
        run_tags = os.environ.get("WANDB_RUN_TAGS")
        wandb.init(
            project=os.environ.get("WANDB_PROJECT", "torchtitan"),
            tags=run_tags.split(",") if run_tags else None,
            dir=log_dir,
            config=job_config.to_dict(),
            **{key: os.environ.get(f"WANDB_{name}") for key, name in options.items()},
        )

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.wandb.log({_tagged(self.tag, key): value for key, value in metrics.items()}, step=step)

    def close(self) -> None:
        if self.wandb.run is not None:
            self.wandb.finish()


class JsonlLogger(BaseLogger):
    """Appends one JSON object per call to a file: `step`, `wall_time` (Unix seconds), metrics.

    NaN and infinities become strings that float() reads. A resumed run appends to the file; if a step
    occurs twice, the later line is valid.
    """

    def __init__(self, path: str, tag: str | None = None) -> None:
        self.tag = tag
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if os.path.exists(path):  # remove a partial last line that a killed run left
            with open_file(path, "rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)
        self.file = open_file(path, "a", encoding="utf-8")
        logger.info("Metrics are appended to %s", path)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        record = {"step": step, "wall_time": time.time()}
        for key, value in metrics.items():
            if isinstance(value, torch.Tensor):
                value = value.item()
            if isinstance(value, float) and not math.isfinite(value):
                value = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}[str(value)]
            record[_tagged(self.tag, key)] = value
        self.file.write(json.dumps(record, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class LoggerContainer(BaseLogger):
    """Passes metrics on to each of its loggers."""

    def __init__(self) -> None:
        self._loggers: list[BaseLogger] = []

    def add_logger(self, backend: BaseLogger) -> None:
        self._loggers.append(backend)

    @property
    def number_of_loggers(self) -> int:
        return len(self._loggers)

    def log(self, metrics: dict[str, Any], step: int) -> None:
        for backend in self._loggers:
            backend.log(metrics, step)

    def close(self) -> None:
        for backend in self._loggers:
            backend.close()


def ensure_pp_loss_visible(
    parallel_dims: ParallelDims, job_config: JobConfig, color: utils.Color | utils.NoColor
) -> None:
    """Warn if LOG_RANK hides the console output of the rank that has the pipeline's loss."""
    shown_ranks = os.environ.get("LOG_RANK") or "all"
    loss_rank = _get_metrics_rank(parallel_dims, job_config)
    if shown_ranks != "all" and str(loss_rank) not in shown_ranks.split(","):
        logger.warning(
            f"{color.red}Rank {loss_rank} prints the loss, and LOG_RANK={shown_ranks} hides its "
            f"output; add the rank to LOG_RANK to see it.{color.reset}"
        )


class MetricsProcessor:
    """Computes a step's metrics, and passes them to the console and the loggers.

    The trainer adds to `ntokens_since_last_log` (labels of this rank) and `data_loading_times` (seconds
    per microbatch), sets the attributes that are None at first, and calls `start(step)`.
    """

    def __init__(
        self, job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None
    ) -> None:
        self.job_config = job_config
        self.parallel_dims = parallel_dims
        self.logger = _build_metric_logger(job_config, parallel_dims, tag)
        self.device_memory_monitor = build_device_memory_monitor()
        is_plain = job_config.metrics.disable_color_printing or os.environ.get("NO_COLOR")
        self.color = utils.NoColor() if is_plain or not sys.stdout.isatty() else utils.Color()
        # None if the peak is unknown; MFU is then left out.
        self.gpu_peak_flops = utils.get_peak_flops(self.device_memory_monitor.device_name)
        self.num_flops_per_token = -1
        self.num_steps = job_config.training.steps
        self.optimizers: OptimizersContainer | None = None
        self.lr_schedulers: LRSchedulersContainer | None = None
        self.model_parts: list[torch.nn.Module] | None = None
        self.start(step=0)

    def start(self, step: int) -> None:
        """Start measuring time and tokens, after `step` training steps."""
        self.step_last_log = step
        self.data_loading_times: list[float] = []
        self._restart()

    def should_log(self, step: int) -> bool:
        """True on the first step, on the last step, and every `metrics.log_freq` steps."""
        return step == 1 or step % self.job_config.metrics.log_freq == 0 or step == self.num_steps

    def log(
        self,
        step: int,
        global_avg_loss: float,
        global_max_loss: float,
        grad_norm: float,
        extra_metrics: dict[str, Any] | None = None,
    ) -> None:
        """Log the metrics since the last call, per device, and start measuring again."""
        assert self.num_flops_per_token > 0, "num_flops_per_token must be set before logging"
        seconds, tokens_per_second = self._throughput()
        seconds_per_step = seconds / max(1, step - self.step_last_log)
        loading_seconds = sum(self.data_loading_times)
        flops_per_second = self.num_flops_per_token * tokens_per_second
        memory = self.device_memory_monitor.get_peak_stats()

        metrics = {
            "loss_metrics/global_avg_loss": global_avg_loss,
            "loss_metrics/global_max_loss": global_max_loss,
            "grad_norm": grad_norm,
            "throughput(tps)": tokens_per_second,
            "tflops": flops_per_second / 1e12,
            "time_metrics/end_to_end(s)": seconds_per_step,
            "time_metrics/data_loading(s)": loading_seconds / max(1, len(self.data_loading_times)),
            "time_metrics/data_loading(%)": 100 * loading_seconds / seconds,
            **memory_metrics(memory),
            "memory/num_alloc_retries": memory.num_alloc_retries,
            "memory/num_ooms": memory.num_ooms,
        }
        if self.gpu_peak_flops is not None:
            metrics["mfu(%)"] = 100 * flops_per_second / self.gpu_peak_flops
        self.logger.log({**metrics, **(extra_metrics or {})}, step)
        own = _fields_of_objective(extra_metrics, "loss_metrics/")
        logger.info(self._console_line(step, metrics, own, seconds_per_step))
        self.start(step)

    def log_validation(
        self, loss: float, step: int, extra_metrics: dict[str, Any] | None = None
    ) -> None:
        """Log a validation loss and its throughput, and start measuring again."""
        _, tokens_per_second = self._throughput()
        memory = self.device_memory_monitor.get_peak_stats()
        metrics = {
            "validation_metrics/loss": loss,
            "validation_metrics/throughput(tps)": tokens_per_second,
        }
        for key, value in memory_metrics(memory).items():
            metrics[f"validation_metrics/{key}"] = value
        self.logger.log({**metrics, **(extra_metrics or {})}, step)

        color = self.color
        own = _fields_of_objective(extra_metrics, "validation_metrics/")
        logger.info(
            f"{color.yellow}validate step: {step:2}  "
            f"{color.green}loss: {loss:7.4f}  "
            + "".join(f"{field}  " for field in own)
            + f"{color.turquoise}{_memory_field(memory.max_reserved_gib, memory.max_reserved_pct)}  "
            f"{color.blue}tps: {round(tokens_per_second):,}{color.reset}",
            extra=event("validation", step),
        )
        self._restart()

    def close(self) -> None:
        self.logger.close()

    def _restart(self) -> None:
        self.ntokens_since_last_log = 0
        self.device_memory_monitor.reset_peak_stats()
        self.time_last_log = time.perf_counter()

    def _throughput(self) -> tuple[float, float]:
        """Return (seconds since the last log, tokens per second per device)."""
        seconds = max(1e-9, time.perf_counter() - self.time_last_log)  # a coarse clock may return 0
        devices = self.parallel_dims.non_data_parallel_size
        return seconds, self.ntokens_since_last_log / (seconds * devices)

    def _console_line(
        self, step: int, metrics: dict[str, Any], own: list[str], seconds_per_step: float
    ) -> str:
        # Scripts parse this line, so the fields up to mfu keep their order and format.
        color = self.color
        memory = _memory_field(
            metrics["memory/max_reserved(GiB)"], metrics["memory/max_reserved(%)"]
        )
        fields = [
            f"{color.red}step: {step:2}",
            f"{color.green}loss: {metrics['loss_metrics/global_avg_loss']:8.5f}",
            f"{color.orange}grad_norm: {metrics['grad_norm']:7.4f}",
            f"{color.turquoise}{memory}",
            f"{color.blue}tps: {round(metrics['throughput(tps)']):,}",
        ]
        if self.device_memory_monitor.device.type != "cpu":  # a CPU's TFLOPS would round to 0.0
            fields.append(f"{color.cyan}tflops: {metrics['tflops']:,.2f}")
        if "mfu(%)" in metrics:
            fields.append(f"{color.magenta}mfu: {metrics['mfu(%)']:.2f}%")
        remaining = timedelta(seconds=round(max(0, self.num_steps - step) * seconds_per_step))
        fields += own
        fields.append(f"{color.reset}progress: {100 * step / self.num_steps:.1f}%")
        fields.append(f"eta: {remaining}")
        return "  ".join(fields)


def build_metrics_processor(
    job_config: JobConfig,
    parallel_dims: ParallelDims,
    model_args: BaseModelArgs | None = None,
    tag: str | None = None,
) -> MetricsProcessor:
    return MetricsProcessor(job_config, parallel_dims, tag)


def _get_metrics_rank(parallel_dims: ParallelDims, job_config: JobConfig) -> int:
    """Return the rank that writes metrics: the first rank that owns the last pipeline stage."""
    if not parallel_dims.pp_enabled:
        return 0
    pp, schedule = parallel_dims.pp, job_config.parallelism.pipeline_parallel_schedule
    return parallel_dims.world_size // pp * rank_of_last_stage(schedule, pp)


def _build_metric_logger(
    job_config: JobConfig, parallel_dims: ParallelDims, tag: str | None = None
) -> BaseLogger:
    """Return one logger that passes this rank's metrics on to all enabled loggers."""
    config, rank = job_config.metrics, utils._rank()
    on_metrics_rank = rank == _get_metrics_rank(parallel_dims, job_config)
    any_enabled = config.enable_wandb or config.enable_tensorboard or config.enable_jsonl
    if not any_enabled or not (on_metrics_rank or config.save_for_all_ranks):
        return BaseLogger()

    container = LoggerContainer()
    folder = job_config.job.dump_folder
    owner = []  # replica and rank, for folder and file names
    if job_config.fault_tolerance.enable:
        owner.append(f"replica_{job_config.fault_tolerance.replica_id}")
    if config.save_for_all_ranks:
        owner.append(f"rank_{rank}")
    now = datetime.now().strftime("%Y%m%d-%H%M")
    log_dir = os.path.join(folder, config.save_tb_folder, now, *owner)
    if config.enable_wandb:
        try:  # the run continues without W&B if W&B fails
            container.add_logger(WandBLogger(log_dir, job_config, tag))
        except Exception as error:
            logger.error("Weights & Biases is not used in this run: %s", error)
    if config.enable_tensorboard:
        container.add_logger(TensorBoardLogger(log_dir, tag))
    if config.enable_jsonl:
        stem, suffix = os.path.splitext(os.path.join(folder, config.save_jsonl_file))
        container.add_logger(JsonlLogger(".".join([stem, *owner]) + suffix, tag))
    return container


def _tagged(tag: str | None, key: str) -> str:
    return key if tag is None else f"{tag}/{key}"


def memory_metrics(memory: DeviceMemStats) -> dict[str, float]:
    """Return the memory metrics by name, in GiB and percent."""
    return {
        "memory/max_active(GiB)": memory.max_active_gib,
        "memory/max_active(%)": memory.max_active_pct,
        "memory/max_reserved(GiB)": memory.max_reserved_gib,
        "memory/max_reserved(%)": memory.max_reserved_pct,
    }


def _fields_of_objective(metrics: dict[str, Any] | None, prefix: str) -> list[str]:
    own = {key: x for key, x in (metrics or {}).items() if key.startswith(prefix)}
    return [f"{key.removeprefix(prefix)}: {x:7.4f}" for key, x in own.items()]


def _memory_field(gib: float, percent: float) -> str:
    return f"memory: {gib:5.2f}GiB({percent:.2f}%)"
