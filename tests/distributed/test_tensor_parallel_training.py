"""Trainer and engine under tensor parallelism: documents, checkpoints, callers' losses and outputs."""

import pytest
import torch

from tests.distributed.training_runs import (
    ONE_PROCESS,
    TENSOR_PARALLEL_LAYOUTS,
    make_trainer,
    max_relative_difference,
    run_layout,
)
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.testing.gloo import run_ranks

TP = TENSOR_PARALLEL_LAYOUTS[0]
TOLERANCE = 1e-5  # fp32: the order of summation differs between layouts


def assert_same(run, other):
    for key in ("loss", "grad_norm"):
        assert max_relative_difference(run[key], other[key]) < TOLERANCE, key


def test_packed_documents_of_odd_length_with_isolation_probe(tmp_path):
    documents = [
        "--training.seq_len=33",
        "--model.attn_type=varlen",
        "--model.attn_mask_type=position_block_causal",
        "--debug.check_document_isolation_freq=1",
    ]
    alone = run_layout(ONE_PROCESS, str(tmp_path / "alone"), 3, documents)
    assert_same(run_layout(TP, str(tmp_path / "tp"), 3, documents), alone)


def batch():
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 2048, (2, 12), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[0, :5] = IGNORE_INDEX
    return {"input": tokens[:, :-1]}, labels


def answers_to_a_caller(folder, overrides):
    """Return logits, the results of an output_fn, and loss and gradients of a loss_fn."""
    trainer = make_trainer(folder, overrides)
    input_dict, labels = batch()
    (logits,) = trainer.forward_step(input_dict)
    (top,) = trainer.forward_step(input_dict, output_fn=lambda x, batch: x.argmax(dim=-1))

    def square_of_logprobs(logits, labels, batch):
        logprobs = logits.log_softmax(dim=-1).gather(-1, labels.clamp(min=0).unsqueeze(-1))
        return (logprobs.squeeze(-1) * (labels != IGNORE_INDEX)).square().sum()

    given = {"input_dict": input_dict, "labels": labels, "global_valid_tokens": torch.tensor(17)}
    loss = trainer.forward_backward_step(**given, loss_fn=square_of_logprobs)
    grads = {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in trainer.model_parts[0].named_parameters()
    }
    own_loss = trainer.forward_backward_step(**given)
    trainer.close()
    return logits, top, loss, grads, own_loss


@pytest.mark.parametrize("extra", [[], ["--parallelism.disable_loss_parallel"]])
def test_callers_get_whole_logits_and_gradients_of_their_loss(extra, tmp_path):
    alone = run_ranks(answers_to_a_caller, 1, str(tmp_path), [], init_process_group=False)[0]
    overrides = ["--parallelism.tensor_parallel_degree=2", *extra]
    for found in run_ranks(
        answers_to_a_caller, 2, str(tmp_path), overrides, init_process_group=False
    ):
        logits, top, loss, grads, own_loss = found
        assert type(logits) is torch.Tensor
        torch.testing.assert_close(logits, alone[0], rtol=1e-4, atol=1e-5)
        assert torch.equal(top, alone[1])
        torch.testing.assert_close(loss, alone[2], rtol=TOLERANCE, atol=0)
        torch.testing.assert_close(own_loss, alone[4], rtol=TOLERANCE, atol=0)
        for name, grad in grads.items():
            assert (grad - alone[3][name]).norm() <= TOLERANCE * alone[3][name].norm(), name
