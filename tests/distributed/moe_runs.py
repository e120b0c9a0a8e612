"""Training of a tiny mixture of experts on the same rows in any layout, for tests."""

import dataclasses
import hashlib

import pytest
import torch
from torch.distributed.tensor import DTensor

from torchtitan.config import JobConfig, Optimizer
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.fsdp import reshard_model
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.models.moe import MoEArgs
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.models.qwen3 import Qwen3Model, Qwen3ModelArgs
from torchtitan.optim.optimizer import build_optimizers_with_moe_load_balancing

VOCAB, LENGTH, ROWS, STEPS = 64, 16, 8, 3


@dataclasses.dataclass(frozen=True)
class Layout:
    """How ranks and microbatches share the same ROWS rows, and what is trained on them.

    num_favoured: so many experts, the first ones, get all the tokens.
    """

    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    num_microbatches: int = 1
    ac_mode: str = "none"
    ac_option: str = "op"
    param_dtype: str = "float32"
    num_experts: int = 6
    num_shared_experts: int = 1
    top_k: int = 2
    num_favoured: int = 0
    use_grouped_mm: bool = True

    @property
    def world_size(self):
        return self.dp_replicate * self.dp_shard * self.tp


def qwen3_args(layout):
    moe_args = MoEArgs(
        num_experts=layout.num_experts,
        top_k=layout.top_k,
        use_grouped_mm=layout.use_grouped_mm,
        num_shared_experts=layout.num_shared_experts,
        score_func="softmax",
        route_norm=True,
        score_before_experts=False,
        load_balance_coeff=0.01,
    )
    return Qwen3ModelArgs(
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


def build(layout):
    config = JobConfig()
    config.activation_checkpoint.mode = layout.ac_mode
    config.activation_checkpoint.selective_ac_option = layout.ac_option
    config.training.mixed_precision_param = layout.param_dtype
    config.parallelism.disable_loss_parallel = True
    dims = ParallelDims(
        dp_replicate=layout.dp_replicate,
        dp_shard=layout.dp_shard,
        cp=1,
        tp=layout.tp,
        pp=1,
        ep=layout.ep,
        etp=layout.etp,
        world_size=layout.world_size,
    )
    with torch.device("meta"):
        model = Qwen3Model(qwen3_args(layout))
    model = parallelize_decoder(model, dims, config).to_empty(device="cpu")
    with torch.no_grad(), seeded_init(model, 1):
        model.init_weights()
        for block in model.layers.values():
            block.moe.expert_bias[: layout.num_favoured] += 10
    return model, dims


def full(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def hash_of_weights(model):
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(full(parameter).detach().numpy().tobytes())
    return digest.hexdigest()


def train(layout):
    """What STEPS steps of AdamW with clipping leave: weights at first and last, losses, ..."""
    model, dims = build(layout)
    record = {"hash": hash_of_weights(model), "losses": [], "grad_norms": []}
    optimizers = build_optimizers_with_moe_load_balancing([model], Optimizer(lr=1e-2), dims)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
    batch_mesh = dims.get_optional_mesh("batch") if layout.world_size > 1 else None
    if batch_mesh is not None:
        tokens = tokens.chunk(batch_mesh.size())[batch_mesh.get_local_rank()]
    for step in range(STEPS):
        total = torch.zeros(())
        for rows in tokens.chunk(layout.num_microbatches):
            logits = model(rows[:, :-1]).flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(
                logits, rows[:, 1:].flatten(), reduction="sum"
            ) / (ROWS * LENGTH)
            loss.backward()
            total += loss.detach()
            with torch.no_grad():  # validation, or a probe: nothing of it may be counted
                model(rows[:, :-1])
            reshard_model(model)
        if batch_mesh is not None:
            torch.distributed.all_reduce(total, group=batch_mesh.get_group())
        record["losses"].append(total.item())
        if step == 0:
            record["gradients"] = {
                name.replace("_checkpoint_wrapped_module.", ""): full(p.grad).clone()
                for name, p in model.named_parameters()
            }
        norm = clip_grad_norm_(model.parameters(), 0.5, foreach=True, ep_enabled=layout.ep > 1)
        record["grad_norms"].append(norm.item())
        optimizers.step()
        optimizers.zero_grad()
    moes = [block.moe for block in model.layers.values()]
    record["biases"] = torch.stack([moe.expert_bias for moe in moes])
    record["counts"] = torch.stack([moe.tokens_per_expert for moe in moes])
    record["weights"] = [full(p).detach().clone() for p in model.parameters()]
    return record


def train_layouts(layouts):
    return [train(layout) for layout in layouts]


def check_same(record, expected, layout):
    """Both records of `train` tell of the same training, up to the order of sums in fp32."""
    assert record["hash"] == expected["hash"], layout
    assert record["losses"] == pytest.approx(expected["losses"], abs=1e-5), layout
    assert record["grad_norms"] == pytest.approx(expected["grad_norms"], rel=1e-5), layout
    assert torch.equal(record["biases"], expected["biases"]), layout
    assert not record["counts"].any()
    assert record["gradients"].keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        difference = (record["gradients"][name] - gradient).abs().amax()
        assert difference <= 1e-5 * gradient.abs().amax(), (layout, name)
    # AdamW divides by the size of a gradient: small ones, of which rounding is most, count in full.
    torch.testing.assert_close(record["weights"], expected["weights"], rtol=1e-3, atol=1e-4)
