"""A tied embedding stays one parameter through meta, sharding, allocation and a step."""

import pytest
import torch
from torch.distributed.tensor import DTensor

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.testing.gloo import run_ranks


def gradients(dp_replicate, dp_shard):
    """Return full gradients after a step on a fixed batch of 4 rows, spread over the ranks."""
    world_size = dp_replicate * dp_shard
    parallel_dims = ParallelDims(dp_replicate, dp_shard, 1, 1, 1, 1, 1, world_size)
    config = JobConfig()
    config.activation_checkpoint.mode = "none"
    config.training.mixed_precision_param = "float32"
    args = TransformerModelArgs(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=64,
        max_seq_len=16,
        enable_weight_tying=True,
    )
    with torch.device("meta"):
        model = Transformer(args)
    model = parallelize_decoder(model, parallel_dims, config)
    model.to_empty(device="cpu")
    with torch.no_grad(), seeded_init(model, 1):
        model.init_weights()
    assert model.output.weight is model.tok_embeddings.weight

    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    rank = torch.distributed.get_rank() if world_size > 1 else 0
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens.chunk(world_size)[rank]).pow(2).sum().backward()
        optimizer.step()
    assert model.output.weight is model.tok_embeddings.weight
    return {
        name: p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("dp_replicate, dp_shard", [(1, 2), (2, 1)])
def test_tied_gradients_equal_those_of_one_process(dp_replicate, dp_shard):
    alone = gradients(1, 1)
    assert "tok_embeddings.weight" in alone and "output.weight" not in alone
    for found in run_ranks(gradients, 2, dp_replicate, dp_shard):
        assert found.keys() == alone.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, alone[name], rtol=1e-4, atol=1e-4, msg=name)
