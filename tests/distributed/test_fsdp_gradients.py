"""Gradients of every data-parallel layout equal those of one process on the whole batch."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

from tests.distributed import parallel_dims
from torchtitan.distributed.dtensor import whole_tensor
from torchtitan.distributed.fsdp import (
    apply_ddp,
    apply_fsdp,
    bytes_to_keep_gathered,
    keep_gathered,
    recover_model,
    reduce_later,
    reshard_model,
)
from torchtitan.distributed.utils import clip_grad_norm_
from torchtitan.testing.gloo import run_ranks

VOCAB, DIM, SEQ_LEN, BATCH = 33, 12, 7, 8  # odd sizes: shards are uneven on 2 and 4 ranks
IGNORED = -100

# Summation order differs between layouts; fp32 has 6e-8 per operation.
RELATIVE_TOLERANCE = 1e-6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(DIM, 3 * DIM)
        self.down = nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x):
        return x + self.down(F.silu(self.up(x)))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleDict({"0": Block(), "1": Block()})
        self.norm = nn.RMSNorm(DIM)
        self.output = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for block in self.layers.values():
            x = block(x)
        return self.output(self.norm(x))


def build_toy():
    torch.manual_seed(0)
    return Toy()


def sharded(model, mesh, **options):
    apply_fsdp(model, mesh, torch.float32, torch.float32, False, **options)
    return model


def global_batch():
    """Tokens and labels [B, T]; valid labels are spread very unevenly over the sequences."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (BATCH, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0] = IGNORED
    labels[1, 2:] = IGNORED
    labels[6, :-1] = IGNORED
    return tokens[:, :-1], labels


def backward_on_slice(model, rank, world_size, microbatches):
    """Run backward over this rank's sequences; returns its share of the loss."""
    tokens, labels = global_batch()
    num_valid = (labels != IGNORED).sum()
    mine = zip(
        tokens.chunk(world_size)[rank].chunk(microbatches),
        labels.chunk(world_size)[rank].chunk(microbatches),
        strict=True,
    )
    total = 0.0
    for x, y in mine:
        logits = model(x).flatten(0, 1)
        loss = F.cross_entropy(logits, y.flatten(), ignore_index=IGNORED, reduction="sum")
        (loss / num_valid).backward()
        total += (loss / num_valid).item()
    return total


def full_grads(model):
    return {name: whole_tensor(p.grad) for name, p in model.named_parameters()}


def gradients(layout, microbatches=1, reshard_policy="default"):
    """Return the gradients of the whole model, and the norm that clipping computes."""
    replicate, shard = layout
    dims = parallel_dims(dp_replicate=replicate, dp_shard=shard)
    model = build_toy()
    if replicate > 1 and shard == 1:
        apply_ddp(model, dims.get_mesh("dp_replicate"), enable_compile=False)
    else:
        sharded(model, dims.get_fsdp_mesh(), reshard_after_forward_policy=reshard_policy)
    rank = dims.get_mesh("batch").get_local_rank() if dims.dp_enabled else 0
    backward_on_slice(model, rank, replicate * shard, microbatches)
    grads = {name: grad.clone() for name, grad in full_grads(model).items()}
    norm = clip_grad_norm_(model.parameters(), max_norm=0.01, foreach=True)
    clipped = clip_grad_norm_(model.parameters(), max_norm=0.01, foreach=True)
    return grads, norm, clipped


def assert_equal_to_one_process(results):
    model = build_toy()
    backward_on_slice(model, 0, 1, 1)
    expected = copy.deepcopy(full_grads(model))
    expected_norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.01)
    for grads, norm, clipped in results:
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            error = (grad - expected[name]).norm() / expected[name].norm()
            assert error < RELATIVE_TOLERANCE, (name, error)
        torch.testing.assert_close(norm, expected_norm, rtol=RELATIVE_TOLERANCE, atol=0)
        assert type(norm) is torch.Tensor
        # 1e-6 is added to the norm before dividing by it.
        torch.testing.assert_close(clipped.item(), 0.01, rtol=1e-4, atol=0)


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(
    "layout", [(1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (4, 1)], ids=lambda d: f"{d[0]}x{d[1]}"
)
def test_gradients_and_norm_equal_one_process(layout, microbatches):
    assert_equal_to_one_process(run_ranks(gradients, layout[0] * layout[1], layout, microbatches))


@pytest.mark.parametrize("policy", ["always", "never"])
def test_reshard_policy_does_not_change_gradients(policy):
    assert_equal_to_one_process(run_ranks(gradients, 2, (1, 2), 1, policy))


@torch.no_grad()
def parameters_after_forward_without_backward():
    """Return whether all parameters are sharded, and the bytes to keep, each at several times."""
    model = sharded(build_toy(), parallel_dims(dp_shard=2).get_fsdp_mesh(), cpu_offload=True)
    are_sharded, n_bytes = [], []

    def note_whether_sharded():
        are_sharded.append(all(isinstance(p, DTensor) for p in model.parameters()))

    note_whether_sharded()
    model(global_batch()[0])
    note_whether_sharded()
    reshard_model(model)
    note_whether_sharded()
    n_bytes.append(bytes_to_keep_gathered(model))
    with keep_gathered(model):
        n_bytes.append(bytes_to_keep_gathered(model))
        model(global_batch()[0])
    n_bytes.append(bytes_to_keep_gathered(model))
    note_whether_sharded()
    return are_sharded, n_bytes


def test_reshard_model_returns_every_parameter_to_its_shard():
    whole = build_toy()
    freed = [*whole.tok_embeddings.parameters(), *whole.layers.parameters()]
    n_freed = 4 * sum(p.numel() for p in freed)  # norm and output are kept by every forward
    for (before, after_forward, *afterwards), n_bytes in run_ranks(
        parameters_after_forward_without_backward, 2
    ):
        assert before and all(afterwards)
        assert not after_forward, "torch no longer needs reshard_model: it can go"
        assert n_bytes == [n_freed, 0, n_freed]


def gradients_after_a_failure(stops_in_backward):
    """Return the gradients of a first microbatch, after a failed one, and after the first again."""
    rank = dist.get_rank()
    model = sharded(build_toy(), parallel_dims(dp_shard=2).get_fsdp_mesh())
    backward_on_slice(model, rank, 2, 1)
    found = [full_grads(model)]
    reduce_later(model, True, whole=True, keeps_weights=False)
    backward_on_slice(model, rank, 2, 1)  # not reduced when the next microbatch fails
    hook = model.layers["0"].register_forward_hook(
        lambda *_: stop() if not stops_in_backward else None
    )
    with pytest.raises(ZeroDivisionError):
        loss = model(global_batch()[0]).sum()
        loss.register_hook(stop)
        loss.backward()
    hook.remove()
    recover_model(model)
    found.append(full_grads(model))
    reduce_later(model, False, whole=True, keeps_weights=False)
    backward_on_slice(model, rank, 2, 1)
    return [*found, full_grads(model)]


def stop(*_):
    raise ZeroDivisionError


@pytest.mark.parametrize("stops_in_backward", [False, True])
def test_a_failed_microbatch_drops_only_gradients_that_are_not_reduced(stops_in_backward):
    for before, after, again in run_ranks(gradients_after_a_failure, 2, stops_in_backward):
        torch.testing.assert_close(after, before, rtol=0, atol=0)
        torch.testing.assert_close(again, {name: 2 * grad for name, grad in before.items()})
