"""An engine leaves its host process as it found it."""

import gc
import logging
import os
import random
import sys
import threading
import warnings

import numpy
import pytest
import torch
import torch.distributed as dist

from tests.distributed import layout_matrix
from tests.distributed.layout_matrix import Layout, batch_flags
from torchtitan import build
from torchtitan.config.checks import ConfigError
from torchtitan.engine import TrainingEngine
from torchtitan.tools import host
from torchtitan.train import Trainer

pytestmark = pytest.mark.long

FLAGS = [
    "--checkpoint.enable",
    "--checkpoint.async_mode=async",
    "--debug.deterministic",
    "--activation_checkpoint.mode=full",
]


def python_threads() -> list[threading.Thread]:
    """Return the threads started from Python; a device's backward runs in a thread of torch."""
    return [t for t in threading.enumerate() if not isinstance(t, threading._DummyThread)]


def host_state() -> dict:
    """Return name -> comparable setting of the process."""
    root, ours = logging.getLogger(), logging.getLogger("torchtitan")
    state = {
        # Torch's compiler adds the path of its cache when it is loaded.
        "environment": {k: v for k, v in os.environ.items() if k != "TORCHINDUCTOR_CACHE_DIR"},
        "directory": os.getcwd(),
        "excepthook": sys.excepthook,
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks)),
        "random": random.getstate(),
        "numpy.random": str(numpy.random.get_state()),
        "torch.random": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "grad": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autograd threads": torch._C._is_multithreading_enabled(),
        "torch threads": torch.get_num_threads(),
        "deterministic": (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.backends.cudnn.deterministic,
            torch.backends.cudnn.benchmark,
        ),
        "precision": torch.get_float32_matmul_precision(),
        "logging": [(list(log.handlers), log.level, log.propagate) for log in (root, ours)],
        "warnings": list(warnings.filters),
        "threads": [thread.name for thread in python_threads()],
        "group": dist.group.WORLD if dist.is_initialized() else None,
        "groups": list(dist.distributed_c10d._world.pg_map),
    }
    for name in ("torch._dynamo.config", "torch._functorch.config", "torch._inductor.config"):
        config = __import__(name, fromlist=["config"])
        state[name] = config.save_config_portable()
    return state


def changed(before: dict, after: dict) -> dict:
    changes = {k: (before[k], after[k]) for k in before if before[k] != after[k]}
    for name, (old, new) in list(changes.items()):
        if isinstance(old, dict):
            changes[name] = {
                k: (old.get(k), new.get(k)) for k in old | new if old.get(k) != new.get(k)
            }
    return changes


def train_a_step(engine) -> float:
    tokens = torch.arange(1, 17).reshape(1, 16)
    loss = engine.forward_backward_step(
        input_dict={"input": tokens}, labels=tokens, global_valid_tokens=16
    )
    engine.forward_step({"input": tokens})
    engine.optim_step()
    return loss.item()


def flags_of(layout: Layout, *flags: str) -> list[str]:
    return [*layout.overrides(), *batch_flags("llama3", "whole rows"), *FLAGS, *flags]


def config_of(layout: Layout, folder: object, *flags: str):
    # Draws from `random`.
    config = layout_matrix.config_of("llama3", flags_of(layout, *flags), str(folder))
    config.debug.seed = None  # a seed sets the host's generators
    return config


def live_and_leave(config) -> tuple[dict, dict]:
    """Return the settings that an engine changed in its life, and those still changed after it."""
    before, of_host = host_state(), python_threads()
    with TrainingEngine(config) as engine:
        train_a_step(engine)
        during = changed(before, host_state())
        engine.save()
    gc.collect()
    join_others(of_host)
    return during, changed(before, host_state())


def lives_of_engines(dump_folder: str) -> list[dict]:
    layouts = (Layout("FSDP 2", dp_shard=2), Layout("DDP 2", dp_replicate=2), Layout("PP 2", pp=2))
    lives = [live_and_leave(config_of(x, f"{dump_folder}/{x.name}"))[1] for x in layouts]
    for changes in lives:
        changes.pop("groups")  # the mesh's groups stay as long as the host's group
    return lives


ALONE = Layout("1 process")


@pytest.fixture(autouse=True)
def no_engine_of_another_test():
    """Restore settings of other tests' engines before a test, not within it."""
    gc.collect()
    for engine in list(host._engines):
        engine.close()

    guest = type("Guest", (), {})()
    host.move_in(guest)
    host.move_out(guest)


def join_others(threads: list[threading.Thread]) -> None:
    for thread in set(python_threads()) - set(threads):
        thread.join(timeout=10)  # torch's thread of the save, which ends soon after its last work


def test_process_is_as_before_after_an_engine_made_its_own_group(tmp_path, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    during, after = live_and_leave(config_of(ALONE, tmp_path))
    assert during.keys() >= {"environment", "deterministic", "group"}
    assert after == {}


def test_engine_that_cannot_be_built_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_):
        assert dist.is_initialized()
        raise ValueError("no memory today")

    monkeypatch.setattr(build, "materialize", fail)
    config = config_of(ALONE, tmp_path)
    before = host_state()
    with pytest.raises(ValueError, match="no memory today"):
        TrainingEngine(config)
    assert changed(before, host_state()) == {}


@pytest.mark.parametrize("first_to_close", [0, 1])
def test_what_two_engines_changed_comes_back_with_the_last(first_to_close, tmp_path):
    configs = [config_of(ALONE, tmp_path / name) for name in ("actor", "reference")]
    before = host_state()
    engines = [TrainingEngine(config) for config in configs]
    engines.pop(first_to_close).close()
    assert dist.is_initialized() and torch.are_deterministic_algorithms_enabled()
    train_a_step(engines[0])
    engines[0].close()
    engines[0].close()
    assert changed(before, host_state()) == {}


def test_each_engine_that_saves_in_the_folder_of_another_is_warned_of(tmp_path, caplog):
    def build(name, *flags):
        return TrainingEngine(config_of(ALONE, tmp_path / name, *flags))

    apart = [build("a"), build("b")]
    apart += [build("a", f"--checkpoint.{x}") for x in ("folder=other", "load_only", "no_enable")]
    assert "two engines" not in caplog.text
    together = [build("a"), build("a")]
    warning, again = [message for message in caplog.messages if "two engines" in message]
    assert warning == again
    assert str(tmp_path / "a" / "checkpoint") in warning
    assert "job.dump_folder" in warning and "checkpoint.folder" in warning
    for engine in apart + together:
        engine.close()


def test_guest_that_saves_nothing_needs_no_place_to_write_and_no_data(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    flags = ["--training.seq_len=33", "--training.dataset=of_nobody"]
    flags += ["--training.dataset_path=./not/there"]
    with TrainingEngine(config_of(ALONE, "/proc/x", *flags, "--checkpoint.no_enable")) as engine:
        assert train_a_step(engine) > 0
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"job\.dump_folder must be a writable"):
        TrainingEngine(config_of(ALONE, "/proc/x", *flags))
    with pytest.raises(ConfigError, match=r"training\.dataset_path"):
        Trainer(config_of(ALONE, tmp_path, *flags))


def test_setting_that_the_host_changed_meanwhile_is_the_hosts(monkeypatch):
    monkeypatch.setenv("TITAN_A", "host")
    monkeypatch.setenv("TITAN_B", "host")
    guest = type("Guest", (), {})()
    host.change_environment("TITAN_A", "changed without an engine")
    host.move_in(guest)
    host.change_environment("TITAN_A", "engine")
    host.change_environment("TITAN_B", "engine")
    monkeypatch.setenv("TITAN_B", "host again")
    host.move_out(guest)
    assert os.environ["TITAN_A"] == "changed without an engine"
    assert os.environ["TITAN_B"] == "host again"


def test_foreign_group_and_process_are_as_before_on_two_ranks(tmp_path):
    from torchtitan.testing.gloo import run_ranks

    for lives in run_ranks(lives_of_engines, 2, str(tmp_path)):
        assert lives == [{}, {}, {}]
