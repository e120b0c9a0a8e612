import json
import math
import mmap
import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.distributed import parallel_dims as dims
from torchtitan.callbacks import metrics as metrics_module
from torchtitan.callbacks.metrics import (
    BaseLogger,
    DeviceMemoryMonitor,
    DeviceMemStats,
    JsonlLogger,
    LoggerContainer,
    MetricsProcessor,
    WandBLogger,
    _build_metric_logger,
    _get_metrics_rank,
    build_device_memory_monitor,
    build_metrics_processor,
    ensure_pp_loss_visible,
)
from torchtitan.config import JobConfig
from torchtitan.testing.gloo import run_ranks
from torchtitan.tools import utils

ANSI = re.compile(r"\x1b\[[0-9;]*m")
GIB = 2**30
MEMORY = [f"memory/max_{kind}({unit})" for kind in ("active", "reserved") for unit in ("GiB", "%")]


def job(tmp_path, **metrics_options) -> JobConfig:
    config = JobConfig()
    config.job.dump_folder = str(tmp_path)
    config.training.steps = 200
    for key, value in metrics_options.items():
        setattr(config.metrics, key, value)
    return config


class Recorder(BaseLogger):
    def __init__(self):
        self.records = []

    def log(self, metrics, step):
        self.records.append((step, dict(metrics)))


@pytest.fixture
def clock(monkeypatch):
    """Replaces time.perf_counter; a test moves `now`."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(metrics_module.time, "perf_counter", lambda: clock.now)
    return clock


def processor(tmp_path, parallel_dims=None, peak=None, **options) -> MetricsProcessor:
    made = build_metrics_processor(job(tmp_path, **options), parallel_dims or dims())
    made.logger = Recorder()
    made.num_flops_per_token = 1_000_000
    made.gpu_peak_flops = peak
    return made


# --- what is logged -------------------------------------------------------------------------


def test_metrics_of_an_interval_are_those_worked_out_by_hand(tmp_path, clock):
    made = processor(tmp_path, parallel_dims=dims(tp=2, cp=2, dp_shard=2), peak=1e12)
    made.start(step=10)
    made.ntokens_since_last_log = 32_000  # of four ranks with the same rows
    made.data_loading_times = [0.1, 0.3]
    clock.now += 4.0
    made.log(20, 2.5, 3.5, 0.75, extra_metrics={"n_tokens_seen": 5, "lr": 1e-3})
    ((step, logged),) = made.logger.records
    memory = [key for key in logged if key.startswith("memory/")]
    assert memory == [*MEMORY, "memory/num_alloc_retries", "memory/num_ooms"]
    assert step == 20
    assert {key: logged[key] for key in logged if key not in memory} == pytest.approx(
        {
            "loss_metrics/global_avg_loss": 2.5,
            "loss_metrics/global_max_loss": 3.5,
            "grad_norm": 0.75,
            "throughput(tps)": 2000.0,
            "tflops": 0.002,
            "mfu(%)": 0.2,
            "time_metrics/end_to_end(s)": 0.4,
            "time_metrics/data_loading(s)": 0.2,
            "time_metrics/data_loading(%)": 10.0,
            "n_tokens_seen": 5,
            "lr": 1e-3,
        }
    )
    assert made.ntokens_since_last_log == 0 and made.data_loading_times == []
    assert made.time_last_log == clock.now


def test_console_line_has_every_field_in_order(tmp_path, clock, caplog):
    made = processor(tmp_path, peak=1e12, disable_color_printing=True)
    made.device_memory_monitor = SimpleNamespace(
        device=torch.device("cuda"),
        get_peak_stats=lambda: DeviceMemStats(1.0, 10.0, 2.5, 25.0, 0, 0),
        reset_peak_stats=lambda: None,
    )
    made.start(step=0)
    made.ntokens_since_last_log = 123_456
    clock.now += 10.0
    with caplog.at_level("INFO"):
        made.log(10, 7.123456, 8.0, 1.5, {"lr": 1, "loss_metrics/margin": -0.25})
    assert caplog.messages[-1] == (
        "step: 10  loss:  7.12346  grad_norm:  1.5000  memory:  2.50GiB(25.00%)  tps: 12,346  "
        "tflops: 0.01  mfu: 1.23%  margin: -0.2500  progress: 5.0%  eta: 0:03:10"
    )


def test_console_line_is_coloured_on_a_terminal_and_keeps_the_format_that_scripts_read(
    tmp_path, caplog, monkeypatch
):
    assert processor(tmp_path).color.red == ""  # not a terminal
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    made = processor(tmp_path)
    with caplog.at_level("INFO"):
        made.log(1, 7.5, 8.0, 1.5)
    line = caplog.messages[-1]
    assert line.startswith(f"{utils.Color.red}step:  1  {utils.Color.green}loss:")
    match = re.search(r"step:\s*(\d+)\s*loss:\s*(\d+\.\d+)", ANSI.sub("", line))
    assert match.groups() == ("1", "7.50000")
    assert "tflops" not in line  # not printed on a CPU
    assert utils.Color.reset in line.split("tps")[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert processor(tmp_path).color.red == ""


def test_first_last_and_every_nth_step_are_logged(tmp_path):
    made = processor(tmp_path, log_freq=4)
    made.num_steps = 10
    assert [step for step in range(1, 12) if made.should_log(step)] == [1, 4, 8, 10]


def test_validation_is_logged_under_its_own_keys(tmp_path, clock, caplog):
    made = processor(tmp_path, disable_color_printing=True)
    made.data_loading_times = [0.5]
    made.ntokens_since_last_log = 300
    clock.now += 2.0
    with caplog.at_level("INFO"):
        made.log_validation(3.25, 20, extra_metrics={"extra": 1})
    ((step, logged),) = made.logger.records
    assert step == 20 and logged["validation_metrics/loss"] == 3.25 and logged["extra"] == 1
    assert logged["validation_metrics/throughput(tps)"] == pytest.approx(150.0)
    keys = ("loss", "throughput(tps)", *MEMORY)
    assert set(logged) == {"extra", *(f"validation_metrics/{key}" for key in keys)}
    line = r"validate step: 20  loss:  3.2500  memory: .*GiB\(.*%\)  tps: 150$"
    assert re.match(line, caplog.messages[-1])
    assert made.data_loading_times == [0.5] and made.ntokens_since_last_log == 0


# --- memory ---------------------------------------------------------------------------------


def test_cpu_memory_is_that_of_this_process(monkeypatch):
    monkeypatch.setattr(utils, "device_type", "cpu")
    monitor = build_device_memory_monitor()
    assert monitor.device == torch.device("cpu") and monitor.device_capacity > 2**28
    before = monitor.get_peak_stats()
    # Allocated by the system, because torch may reuse memory that an earlier test has freed.
    with mmap.mmap(-1, 64 * 2**20) as block:
        block.write(b"x" * len(block))
        after = monitor.get_peak_stats()
    grown = after.max_active_gib - before.max_active_gib
    assert 50 / 1024 < grown < 100 / 1024
    assert after.max_reserved_gib >= after.max_active_gib
    percent = 100 * after.max_active_gib / monitor.device_capacity_gib
    assert after.max_active_pct == pytest.approx(percent)
    assert (after.num_alloc_retries, after.num_ooms) == (0, 0)
    monitor.reset_peak_stats()


def test_accelerator_memory_is_read_from_the_allocator(monkeypatch, caplog):
    cuda = mock.Mock()
    cuda.get_device_name.return_value = "NVIDIA H100 80GB HBM3"
    cuda.current_device.return_value = 3
    cuda.get_device_properties.return_value.total_memory = 80 * GIB
    stats = {"active_bytes.all.peak": 20 * GIB, "reserved_bytes.all.peak": 40 * GIB}
    cuda.memory_stats.return_value = stats | {"num_alloc_retries": 2}
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    monkeypatch.setattr(utils, "device_type", "cuda")
    monitor = DeviceMemoryMonitor()
    assert cuda.empty_cache.called and cuda.reset_peak_memory_stats.called
    assert (monitor.device_index, monitor.device_capacity_gib) == (3, 80)
    assert monitor.get_peak_stats() == DeviceMemStats(20, 25, 40, 50, 2, -1)
    assert "retry 2 times" in caplog.text
    assert DeviceMemoryMonitor("cuda:1").device_index == 1


# --- loggers --------------------------------------------------------------------------------


def test_jsonl_line_is_on_disk_at_once_and_valid_for_any_number(tmp_path):
    path = tmp_path / "sub" / "metrics.jsonl"
    logger = JsonlLogger(str(path), tag="t")
    logger.log({"a": math.nan, "b": math.inf, "c": -math.inf, "d": torch.tensor(2), "e": 0.5}, 3)
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert record.pop("wall_time") > 1e9
    numbers = {"t/a": "NaN", "t/b": "Infinity", "t/c": "-Infinity", "t/d": 2, "t/e": 0.5}
    assert record == {"step": 3, **numbers}
    assert math.isnan(float(record["t/a"])) and float(record["t/c"]) == -math.inf
    logger.close()


def test_jsonl_of_a_resumed_run_is_appended_after_the_last_whole_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    logger = JsonlLogger(str(path))
    logger.log({}, 2)
    logger.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


@pytest.fixture
def fake_wandb(monkeypatch):
    for name in ("TEAM", "PROJECT", "RUN_NAME", "RUN_ID", "RUN_NOTES", "RUN_TAGS", "RUN_GROUP"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.setitem(sys.modules, "wandb", mock.Mock())
    return sys.modules["wandb"]


def test_wandb_run_is_described_by_the_environment(fake_wandb, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_TEAM", "us")
    monkeypatch.setenv("WANDB_RUN_TAGS", "a,b")
    config = job(tmp_path)
    logger = WandBLogger(str(tmp_path / "wandb_dir"), config, tag="t")
    logger.log({"loss": 1.0}, 4)
    logger.close()
    init = fake_wandb.init.call_args.kwargs
    assert (init["entity"], init["project"], init["tags"]) == ("us", "torchtitan", ["a", "b"])
    assert init["config"] == config.to_dict() and (tmp_path / "wandb_dir").is_dir()
    assert fake_wandb.mock_calls[1:] == [mock.call.log({"t/loss": 1.0}, step=4), mock.call.finish()]


def test_missing_wandb_is_reported_and_the_other_loggers_work(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", None)
    container = _build_metric_logger(job(tmp_path, enable_wandb=True, enable_jsonl=True), dims())
    assert container.number_of_loggers == 1
    assert "pip install torchtitan-embeddable[wandb]" in caplog.text
    container.close()


def test_all_backends_can_be_active_at_once(fake_wandb, tmp_path):
    config = job(tmp_path, enable_wandb=True, enable_tensorboard=True, enable_jsonl=True)
    container = _build_metric_logger(config, dims())
    assert isinstance(container, LoggerContainer) and container.number_of_loggers == 3
    container.log({"loss": 1.0}, 1)
    container.close()
    (folder,) = (tmp_path / "tb").iterdir()
    assert re.fullmatch(r"\d{8}-\d{4}", folder.name)
    assert fake_wandb.init.call_args.kwargs["dir"] == str(folder)
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 1.0


def log_on_every_rank(config: JobConfig) -> None:
    container = _build_metric_logger(config, dims(dp_shard=2))
    container.log({"rank": torch.distributed.get_rank()}, 1)
    container.close()


@pytest.mark.parametrize("everyone", [False, True])
def test_one_rank_writes_unless_all_are_asked_to(tmp_path, everyone):
    config = job(tmp_path, enable_jsonl=True, save_for_all_ranks=everyone)
    run_ranks(log_on_every_rank, 2, config)
    written = {p.name: json.loads(p.read_text())["rank"] for p in tmp_path.glob("*.jsonl")}
    of_each = {"metrics.rank_0.jsonl": 0, "metrics.rank_1.jsonl": 1}
    assert written == (of_each if everyone else {"metrics.jsonl": 0})


# --- pipelines ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule, rank", [("1F1B", 6), ("zbvzerobubble", 0)])
def test_metrics_rank_holds_the_last_pipeline_stage(tmp_path, schedule, rank):
    config = job(tmp_path)
    config.parallelism.pipeline_parallel_schedule = schedule
    assert _get_metrics_rank(dims(pp=4, dp_shard=2), config) == rank
    assert _get_metrics_rank(dims(dp_shard=8), config) == 0


@pytest.mark.parametrize("log_rank, warned", [("0", True), ("0,6", False), ("", False)])
def test_hidden_loss_rank_is_warned_about(tmp_path, monkeypatch, caplog, log_rank, warned):
    monkeypatch.setenv("LOG_RANK", log_rank)
    ensure_pp_loss_visible(dims(pp=4, dp_shard=2), job(tmp_path), utils.NoColor())
    assert ("Rank 6 prints the loss" in caplog.text) == warned
