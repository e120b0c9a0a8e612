"""A mixture of experts under FSDP, HSDP and DDP against one process, with checkpointing."""

import dataclasses
import hashlib

import pytest
import torch
from torch.distributed.tensor import DTensor

from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing
from torchtitan.config import JobConfig, Optimizer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import reshard_model
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.models.moe import MoEArgs
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs
from torchtitan.testing.gloo import run_ranks

VOCAB, LENGTH, ROWS, STEPS = 64, 16, 8, 3


@dataclasses.dataclass(frozen=True)
class Layout:
    """How ranks and microbatches share the same ROWS rows."""

    dp_replicate: int = 1
    dp_shard: int = 1
    num_microbatches: int = 1
    ac_mode: str = "none"
    ac_option: str = "op"
    param_dtype: str = "float32"

    @property
    def world_size(self):
        return self.dp_replicate * self.dp_shard


TWO_RANKS = [
    Layout(dp_shard=2),
    Layout(dp_replicate=2),
    Layout(dp_replicate=2, num_microbatches=2, ac_mode="full"),
    Layout(dp_shard=2, num_microbatches=2, ac_mode="selective"),
]
FOUR_RANKS = [
    Layout(dp_shard=4, ac_mode="full"),  # 6 experts: two ranks hold none of the last two
    Layout(dp_replicate=2, dp_shard=2, ac_mode="selective", ac_option="2"),
]


def build(layout):
    moe_args = MoEArgs(
        num_experts=6,
        top_k=2,
        num_shared_experts=1,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        load_balance_coeff=0.01,
    )
    args = Qwen3ModelArgs(
        dim=32,
        n_layers=2,
        n_heads=4,
        n_kv_heads=2,
        vocab_size=VOCAB,
        head_dim=16,
        max_seq_len=LENGTH,
        moe_enabled=True,
        moe_inter_dim=24,
        moe_args=moe_args,
    )
    config = JobConfig()
    config.activation_checkpoint.mode = layout.ac_mode
    config.activation_checkpoint.selective_ac_option = layout.ac_option
    config.training.mixed_precision_param = layout.param_dtype
    dims = ParallelDims(
        layout.dp_replicate, layout.dp_shard, 1, 1, 1, 1, 1, world_size=layout.world_size
    )
    with torch.device("meta"):
        model = Qwen3Model(args)
    model = parallelize_decoder(model, dims, config).to_empty(device="cpu")
    with torch.no_grad(), seeded_init(model, 1):
        model.init_weights()
    return model, dims


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hash_of_weights(model):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(full(parameter).detach().numpy().tobytes())
    return digest.hexdigest()


def train(layout):
    """What STEPS steps of AdamW leave: weights at first, losses, first gradients, biases."""
    model, dims = build(layout)
    record = {"hash": hash_of_weights(model), "losses": []}
    optimizers = build_optimizers_with_moe_load_balancing([model], Optimizer(lr=1e-2), dims)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    rank = torch.distributed.get_rank() if layout.world_size > 1 else 0
    mine = tokens.chunk(layout.world_size)[rank]
    for step in range(STEPS):
        total = torch.zeros(())
        for rows in mine.chunk(layout.num_microbatches):
            logits = model(rows[:, :-1]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(
                logits, rows[:, 1:].flatten(), reduction="sum"
            ) / (ROWS * LENGTH)
            loss.backward()
            total += loss.detach()
            with torch.no_grad():  # validation, or a probe: nothing of it may be counted
                model(rows[:, :-1])
            reshard_model(model)
        if layout.world_size > 1:
            torch.distributed.all_reduce(total)
        record["losses"].append(total.item())
        if step == 0:
            record["gradients"] = [full(p.grad).clone() for p in model.parameters()]
        optimizers.step()
        optimizers.zero_grad()
    moes = [block.moe for block in model.layers.values()]
    record["biases"] = torch.stack([moe.expert_bias for moe in moes])
    record["counts"] = torch.stack([moe.tokens_per_expert for moe in moes])
    return record


def train_layouts(layouts):
    return [train(layout) for layout in layouts]


def bf16_run(layout):
    record = train(layout)
    return record["losses"], record["biases"]


@pytest.fixture(scope="module")
def one_process():
    return run_ranks(train, 1, Layout())[0]


@pytest.mark.parametrize("layouts", [TWO_RANKS, FOUR_RANKS], ids=["2 ranks", "4 ranks"])
def test_every_layout_learns_and_balances_as_one_process_does(layouts, one_process):
    assert one_process["losses"][-1] < one_process["losses"][0] - 0.3
    assert one_process["biases"].abs().amax() > 0.005 and not one_process["counts"].any()
    for records in run_ranks(train_layouts, layouts[0].world_size, layouts):
        for layout, record in zip(layouts, records, strict=True):
            assert record["hash"] == one_process["hash"], layout
            assert record["losses"] == pytest.approx(one_process["losses"], abs=1e-5), layout
            assert torch.equal(record["biases"], one_process["biases"]), layout
            assert not record["counts"].any()
            torch.testing.assert_close(
                record["gradients"], one_process["gradients"], rtol=1e-4, atol=1e-6
            )


def test_bf16_parameters_train_on_two_ranks(one_process):
    layout = Layout(dp_shard=2, param_dtype="bfloat16")
    (losses, biases), (_, biases_of_other) = run_ranks(bf16_run, 2, layout)
    assert losses == pytest.approx(one_process["losses"], abs=0.03)  # bf16 keeps three digits
    assert torch.equal(biases, biases_of_other) and biases.dtype == torch.float32
