"""A tied embedding in a pipeline, with copies on two stages: its weights, optimizer state and checkpoints.

That it trains as in one process, and its copies stay equal, is in test_layout_matrix; that its checkpoints
continue in any layout in test_checkpoint_layouts; the weights it streams in test_engine_state.
"""

from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.distributed.layout_matrix import (
    BY_NAME,
    ONE_PROCESS,
    named_parameters,
    run_step,
    whole,
)
from tests.distributed.test_engine_state import TIED, build
from tests.unit.models.tiny import filled, on_meta
from torchtitan.checkpoint.stream import WeightStream
from torchtitan.distributed import utils as dist_utils
from torchtitan.distributed.tied_copies import FIRST, SECOND, copies_in, sum_gradients
from torchtitan.rl.policy import ReferencePolicy
from torchtitan.rl.snapshots import exchange
from torchtitan.rl.weight_sync import OurNames, copy_weights
from torchtitan.testing.gloo import run_ranks

NAMES = ["PP 2, 1F1B", "PP 2, ZBVZeroBubble"]
PIPELINES = [BY_NAME[name] for name in NAMES]
FLAGS = ["--optimizer.eps=1e-3", "--training.max_norm=0.5", "--checkpoint.last_save_in_hf"]


def state_of(engine):
    """Return whole weights and optimizer state of this rank's stages, by names in the whole model."""
    state = {
        key: whole(value)
        for key, value in engine.optimizers.state_dict().items()
        if isinstance(value, torch.Tensor)
    }
    state |= {name: whole(parameter) for name, parameter in named_parameters(engine)}
    first, *others = copies_in(engine.model_parts) or [None]
    assert all(torch.equal(first, other) for other in others)
    return state


def test_copies_that_are_frozen_get_no_gradient():
    trained, frozen = ([nn.Parameter(torch.ones(2, 3)) for _ in range(2)] for _ in range(2))
    trained[0].grad = torch.full((2, 3), 2.0)
    frozen[0].requires_grad_(False), frozen[1].requires_grad_(False)
    for copies in (trained, frozen):
        sum_gradients(copies, group=None, other_rank=0)
    assert all(torch.equal(copy.grad, trained[0].grad) for copy in trained)
    assert all(copy.grad is None for copy in frozen)


def joined(ranks):
    """Merge the states of all ranks, which must agree where they overlap."""
    together = {}
    for state in ranks:
        for name, tensor in state.items():
            assert torch.equal(together.setdefault(name, tensor), tensor), name
    return together


def alone(folder):
    """Run two steps, save in both formats, run a third; returns both states, the last norm, and names."""
    engine = build(TIED, ONE_PROCESS, f"{folder}/alone", *FLAGS)
    for step in range(2):
        run_step(engine, ONE_PROCESS, step)
        engine.optim_step()
    engine.save(f"{folder}/start")
    engine.checkpointer.save(2, last_step=True)
    start = state_of(engine)
    names = set(reference_policy(engine).state_dict())
    run_step(engine, ONE_PROCESS, 2)
    norm = engine.optim_step().grad_norm.item()
    engine.close()
    return start, state_of(engine), norm, names


def in_pipelines(layouts, folder):
    return [in_pipeline(layout, folder) for layout in layouts]


def in_pipeline(layout, folder):
    """Continue a run in a pipeline, with a client's manual step."""
    engine = build(TIED, layout, f"{folder}/{layout.name}", *FLAGS, "--debug.seed=8")
    found = {}
    assert engine.load(f"{folder}/alone/checkpoint/step-2")
    found["from Hugging Face files"] = without_states(state_of(engine))
    assert engine.load(f"{folder}/start")
    run_step(engine, layout, 2)
    # New memory, as after `to(device)`; but the loaded optimizer state is to be stepped as it is.
    engine.offloader.replace({"model", "grad"}, torch.clone)
    parameters = [parameter for _, parameter in named_parameters(engine)]
    pp_mesh = engine.parallel_dims.get_mesh("pp")
    found["norm"] = dist_utils.clip_grad_norm_(parameters, 0.5, pp_mesh=pp_mesh).item()
    engine.optimizers.step()
    engine.optimizers.zero_grad()
    found["stepped"] = state_of(engine)
    engine.checkpointer.save(3, last_step=True)
    found["streamed"] = {name: tensor.clone() for name, tensor in engine.iter_hf_weights()}

    generator = on_meta(engine.train_spec.model_cls, engine.model_args).to_empty(device="cpu")
    filled(generator)
    schedule = engine.pp_schedule
    ours = WeightStream(
        *(engine.model_parts, OurNames(), engine.device),
        stage_indices=[stage.stage_index for stage in schedule.stages],
        pp_group=schedule.group,
    )
    copy_weights(ours, generator)
    found["pushed"] = generator.state_dict()

    reference = reference_policy(engine)
    saved = reference.state_dict()
    found["names of the reference"] = set(saved)
    reference.load_state_dict({name: torch.zeros_like(tensor) for name, tensor in saved.items()})
    for is_changed in (False, True):
        exchange(engine, reference._weights)
        assert all(copy.any() == is_changed for copy in copies_in(engine.model_parts))
    engine.close()
    return found


def reference_policy(engine):
    return ReferencePolicy(SimpleNamespace(engine=engine))


def without_states(state):
    return {name: tensor for name, tensor in state.items() if not name.startswith("state.")}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, result of `alone`, layout -> the ranks' results)."""
    folder = tmp_path_factory.mktemp("tied")
    (one,) = run_ranks(alone, 1, str(folder))
    ranks = run_ranks(in_pipelines, 2, PIPELINES, str(folder), timeout_seconds=240)
    return folder, one, dict(zip(NAMES, zip(*ranks, strict=True), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_client_that_clips_and_steps_by_hand_counts_the_embedding_once(runs, name):
    _, (_, expected, norm, _), in_pipeline = runs
    # fp32: the order of summation differs.
    assert [rank["norm"] for rank in in_pipeline[name]] == pytest.approx([norm] * 2, rel=1e-6)
    found = joined(rank["stepped"] for rank in in_pipeline[name])
    assert found.keys() == expected.keys() and f"state.{FIRST}.exp_avg" in found
    for key, tensor in expected.items():
        scale = tensor.abs().max().item()
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-5 * scale, msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_pipeline_reads_and_writes_the_hugging_face_files_of_one_process(runs, name):
    folder, (start, *_), in_pipeline = runs
    loaded = joined(rank["from Hugging Face files"] for rank in in_pipeline[name])
    assert FIRST in loaded and SECOND not in loaded
    assert_same(loaded, without_states(start))
    files = {}
    for file in (folder / name).glob("checkpoint/step-3/*.safetensors"):
        files |= load_file(file)
    for rank in in_pipeline[name]:
        streamed = rank["streamed"]
        assert_same(files | {"lm_head.weight": streamed["lm_head.weight"]}, streamed)
    assert "lm_head.weight" not in files


@pytest.mark.parametrize("name", NAMES)
def test_generator_and_reference_of_rl_get_the_weights_of_a_pipeline(runs, name):
    _, (*_, reference), in_pipeline = runs
    expected = without_states(joined(rank["stepped"] for rank in in_pipeline[name]))
    for rank in in_pipeline[name]:
        assert_same(rank["pushed"], expected | {SECOND: expected[FIRST]})
    names = set.union(*(rank["names of the reference"] for rank in in_pipeline[name]))
    assert names == reference
