"""The tensors that FSDP casts to bf16, and those that it leaves in fp32."""

import torch

from torchtitan.config import JobConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs
from torchtitan.testing.gloo import run_ranks

VOCAB, LENGTH, ROWS = 64, 16, 4


def build(dp_shard):
    config = JobConfig()
    config.activation_checkpoint.mode = "none"
    config.training.mixed_precision_param = "bfloat16"
    args = Qwen3ModelArgs(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=VOCAB,
        head_dim=16,
        hidden_dim=48,
        max_seq_len=4096,
    )
    with torch.device("meta"):
        model = Qwen3Model(args)
    parallel_dims = ParallelDims(1, dp_shard, 1, 1, 1, 1, 1, dp_shard)
    model = parallelize_decoder(model, parallel_dims, config).to_empty(device="cpu")
    with torch.no_grad(), seeded_init(model, 1):
        model.init_weights()
    return model


def bf16_logits(dp_shard):
    """Return (logits of rows that begin at position 4000, dtypes of the inputs of a block's attention)."""
    model = build(dp_shard)
    if dp_shard == 1:  # what FSDP does to parameters, and only to them
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16()
    dtypes = []
    model.layers["1"].attention.register_forward_pre_hook(
        lambda module, args: dtypes.extend(arg.dtype for arg in args[:2])
    )
    rank = torch.distributed.get_rank() if dp_shard > 1 else 0
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator).chunk(dp_shard)[rank]
    positions = torch.arange(4000, 4000 + LENGTH).expand(len(tokens), -1)
    with torch.no_grad():
        return model(tokens, positions=positions), dtypes


def test_position_tables_stay_fp32_where_parameters_are_bf16():
    expected, _ = bf16_logits(1)
    results = run_ranks(bf16_logits, 2, 2)
    for _, dtypes in results:
        assert dtypes == [torch.bfloat16, torch.float32]
    assert torch.equal(torch.cat([logits for logits, _ in results]), expected)
