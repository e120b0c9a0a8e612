"""Losses of whole rows, groups and places of ranks, as embedders use them, on gloo ranks."""

import pytest
import torch
import torch.distributed as dist

from tests.distributed.layout_matrix import batch_flags, config_of, gradients_of
from torchtitan.distributed.utils import dist_sum
from torchtitan.engine import RankLayout, TrainingEngine
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.testing.gloo import run_ranks

DEGREES = ("data_parallel_shard", "tensor_parallel", "context_parallel", "pipeline_parallel")


def make_config(folder, *flags, **degrees):
    parallelism = [f"--parallelism.{name}_degree={degrees.get(name, 1)}" for name in DEGREES]
    own = [*batch_flags("llama3", "documents, varlen"), *parallelism, *flags]
    return config_of("llama3", own, str(folder))


def samples(seed):
    """Three samples in a row of 29 tokens, which no number of ranks divides."""
    tokens = torch.randint(0, 64, (1, 30), generator=torch.Generator().manual_seed(seed))
    lengths = [7, 12, 10]
    batch = {
        "input": tokens[:, :-1],
        "positions": torch.cat([torch.arange(n) for n in lengths])[None],
        "temperature": torch.tensor([1.0, 0.5, 2.0]).repeat_interleave(torch.tensor(lengths))[None],
        "lengths": lengths,
    }
    return batch, tokens[:, 1:]


def of_samples(outputs, labels, batch):
    """A loss that is no sum over tokens: each sample's log-probs enter together."""
    assert outputs.logprobs.shape == labels.shape == batch["input"].shape == (1, 29)
    parts = zip(
        outputs.logprobs[0].split(batch["lengths"]),
        outputs.entropy[0].split(batch["lengths"]),
        strict=True,
    )
    return sum((logprobs.mean().exp() - entropy.mean()) ** 2 for logprobs, entropy in parts)


def step(folder, degrees):
    """(loss of all ranks, norm, gradients of this rank's part) of two microbatches."""
    with TrainingEngine(make_config(folder, **degrees)) as engine:
        batches, labels = zip(*(samples(seed) for seed in (0, 1)), strict=True)
        loss = engine.forward_backward_step(
            input_dict=list(batches),
            labels=list(labels),
            global_valid_tokens=1.0,
            head=TokenLogProbs(temperature="temperature", entropy=True),
            loss_fn=of_samples,
            whole_rows=True,
        )
        loss = dist_sum(loss, engine.parallel_dims.get_optional_mesh("loss"))
        gradients = gradients_of(engine)
        return loss, float(engine.optim_step().grad_norm), gradients


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_ranks(step, 1, str(tmp_path_factory.mktemp("alone")), {})[0]


@pytest.mark.parametrize(
    "degrees",
    [
        {"context_parallel": 2},
        pytest.param({"context_parallel": 2, "pipeline_parallel": 2}, marks=pytest.mark.slow),
        pytest.param({"context_parallel": 2, "tensor_parallel": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_loss_of_whole_samples_has_the_gradients_of_one_process(degrees, alone, tmp_path):
    loss, norm, gradients = alone
    for of_rank in run_ranks(step, 2 ** len(degrees), str(tmp_path), degrees):
        assert of_rank[0] == pytest.approx(loss, rel=2e-6)
        assert of_rank[1] == pytest.approx(norm, rel=5e-6)
        for name, gradient in of_rank[2].items():
            torch.testing.assert_close(gradient, gradients[name], rtol=1e-4, atol=2e-6)


def places(folder):
    """Of each layout: place of this rank, the ranks of its group, and what the engine says."""
    result = []
    for degrees, flags in (
        ({"data_parallel_shard": 2}, []),
        ({"tensor_parallel": 2}, []),
        ({"pipeline_parallel": 2}, []),
        ({"pipeline_parallel": 2}, ["--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"]),
    ):
        config = make_config(folder, *flags, **degrees)
        config.model.name, config.model.flavor = "llama3", "debugmodel"
        with RankLayout.join(config) as layout:
            ranks = dist.get_process_group_ranks(layout.dp_group)
            place = layout.dp_rank, layout.dp_size, layout.has_outputs, layout.is_output_source
            with TrainingEngine(config, layout=layout) as engine:
                assert (engine.dp_rank, engine.dp_size) == (layout.dp_rank, layout.dp_size)
                assert engine.has_outputs is layout.has_outputs
            result.append((ranks, *place))
    return result


def test_layout_says_where_a_rank_stands_before_there_is_a_model(tmp_path):
    first, second = run_ranks(places, 2, str(tmp_path))
    assert first == [
        ([0, 1], 0, 2, True, True),
        ([0], 0, 1, True, True),
        ([0], 0, 1, False, False),
        ([0], 0, 1, True, True),
    ]
    assert second == [
        ([0, 1], 1, 2, True, True),
        ([1], 0, 1, True, False),
        ([1], 0, 1, True, True),
        ([1], 0, 1, False, False),
    ]
