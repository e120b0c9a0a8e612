"""A run continues from a checkpoint of any layout in any other, as if it had never stopped."""

import pytest
import torch

from tests.distributed.layout_matrix import (
    BATCHES,
    BY_NAME,
    ONE_PROCESS,
    Layout,
    build_engine,
    hash_of,
    run_step,
    whole,
)
from torchtitan.testing.gloo import run_ranks

LAYOUTS = [
    Layout("FSDP 2", dp_shard=2),
    Layout("TP 2", tp=2),
    Layout("PP 2", pp=2),
    Layout("CP 2", cp=2),
    Layout("FSDP 2, EP 2", dp_shard=2, ep=2),
]
FAMILY = "one dense layer, one of experts"
TIED, PIPELINES = "qwen3, tied", [BY_NAME[name] for name in ("PP 2, 1F1B", "PP 2, ZBVZeroBubble")]
SAVED_STEP = 2
# fp32: layouts differ in the order of summation.
TOLERANCE = 1e-5
MUON = ("--optimizer.name=Muon", "--optimizer.muon.ns_dtype=float32")


def engine_of(layout, family, folder, flags):
    return build_engine(
        family,
        [
            *layout.overrides(),
            *BATCHES["whole rows"],
            "--checkpoint.enable",
            f"--checkpoint.interval={SAVED_STEP}",
            "--lr_scheduler.warmup_steps=10",  # another learning rate in every step
            *flags,
        ],
        f"{folder}/{layout.name}",
    )


def state_of(engine):
    """Hashes of weights, buffers and optimizer state, gathered, and the numbers beside them.

    Those of this rank's pipeline stages.
    """
    states = [part.state_dict() for part in engine.model_parts]
    states += [engine.optimizers.state_dict(), engine.lr_schedulers.state_dict()]
    states += [engine.state_dict()]
    return {
        key: hash_of(whole(value)) if isinstance(value, torch.Tensor) else value
        for state in states
        for key, value in state.items()
    }


def take_steps(engine, layout, count):
    """(loss, gradient norm, learning rate) of every step."""
    records = []
    for _ in range(count):
        loss = run_step(engine, layout, engine.step)
        result = engine.optim_step()
        records.append((loss, float(whole(result.grad_norm)), result.lr))
        engine.step += 1
    return records


def train_and_save(layouts, family, folder, flags):
    """Layout -> (the saved state, the records of the steps after it)."""
    records = {}
    for layout in layouts:
        engine = engine_of(layout, family, folder, flags)
        take_steps(engine, layout, SAVED_STEP)
        engine.checkpointer.save(engine.step)
        records[layout.name] = state_of(engine), take_steps(engine, layout, 2)
        engine.close()
    return records


def load_and_go_on(sources_of, family, folder, flags):
    """(source, layout) -> (the loaded state, the records of the steps after it).

    The first load is into a new engine, those after it over the state of other steps.
    """
    records = {}
    for layout, sources in sources_of:
        engine = engine_of(layout, family, folder, flags)
        for source in sources:
            engine.checkpointer.folder = f"{folder}/{source.name}/checkpoint"
            assert engine.checkpointer.load(step=SAVED_STEP)
            key = source.name, layout.name
            records[key] = state_of(engine), take_steps(engine, layout, 2)
        engine.close()
    return records


def run(fn, world_size, *args):
    """Records of all ranks, the states of all pipeline stages together."""
    first, *others = run_ranks(fn, world_size, *args, timeout_seconds=300)
    for records in others:
        for key, (state, steps) in records.items():
            assert steps == first[key][1], "ranks report different steps"
            first[key][0].update(state)
    return first


# The others that each layout loads from: the one or two before it in a ring, or all.
@pytest.mark.parametrize(
    "family, layouts, n_sources, flags",
    [
        (FAMILY, LAYOUTS, 1, ()),
        pytest.param(TIED, PIPELINES, 1, (), id="tied"),
        pytest.param(FAMILY, LAYOUTS, len(LAYOUTS), (), marks=pytest.mark.slow),
        pytest.param(FAMILY, LAYOUTS, 2, MUON, marks=pytest.mark.slow, id="Muon"),
    ],
)
def test_a_checkpoint_of_any_layout_goes_on_in_any_other(
    family, layouts, n_sources, flags, tmp_path
):
    ring, given = [*layouts, ONE_PROCESS], (family, str(tmp_path), flags)
    sources_of = [
        (layout, [ring[i - k] for k in range(1, n_sources + 1)]) for i, layout in enumerate(ring)
    ]
    saved = run(train_and_save, 1, [ONE_PROCESS], *given)
    saved |= run(train_and_save, 2, layouts, *given)
    loaded = run(load_and_go_on, 1, sources_of[-1:], *given)
    loaded |= run(load_and_go_on, 2, sources_of[:-1], *given)

    assert len(loaded) == len(ring) * n_sources
    for (source, layout), (state, steps) in loaded.items():
        expected_state, expected_steps = saved[source]
        different = [
            key for key in state | expected_state if state.get(key) != expected_state.get(key)
        ]
        assert not different, f"{source} -> {layout}"
        for numbers, expected in zip(steps, expected_steps, strict=True):
            assert numbers == pytest.approx(expected, rel=TOLERANCE), f"{source} -> {layout}"
