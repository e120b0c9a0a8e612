"""A batch is one value from the door of a step on; clients' own methods get it as a dict."""

import dataclasses
from unittest import mock

import pytest
import torch

from tests.unit.batch.document_runs import make_trainer
from torchtitan.batch import policy
from torchtitan.batch.batch import TokenBatch
from torchtitan.trainer import Trainer

pytestmark = pytest.mark.long

TOKENS = torch.arange(6).view(2, 3)


def test_value_cannot_be_changed_and_leaves_the_callers_dict_alone():
    given = {"input": TOKENS, "positions": TOKENS % 3, "names": ["a", "b"]}
    batch = TokenBatch.from_dict(given)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.labels = TOKENS
    given["more"] = 1
    assert batch.as_dict() == {key: given[key] for key in ("input", "positions", "names")}


@pytest.mark.parametrize("kind", [torch.Tensor.numpy, torch.Tensor.tolist])
def test_known_entry_that_is_no_tensor_is_named(kind):
    for key in ("labels", "positions", "document_ids", "seq_lens", "cu_seqlens", "routed_experts"):
        with pytest.raises(ValueError, match=f"batch's '{key}' must be a tensor, got (nd|list)"):
            TokenBatch.from_dict({"input": TOKENS, key: kind(TOKENS)})
        TokenBatch.from_dict({"input": TOKENS, key: None, "names": ["a", "b"]})


@pytest.mark.parametrize("steps_ahead", [True, False])
def test_documents_of_a_microbatch_are_read_once(tmp_path, monkeypatch, steps_ahead):
    counting = mock.Mock(side_effect=policy.read_document_ids)
    monkeypatch.setattr(policy, "read_document_ids", counting)
    trainer = make_trainer(tmp_path, "flex", "--training.steps=3", "--training.global_batch_size=4")
    if not steps_ahead:
        trainer.batch_generator = lambda batches: Trainer.batch_generator(trainer, batches)
    trainer.train()
    trainer.close()
    assert counting.call_count == 3 * trainer.gradient_accumulation_steps


def test_clients_own_methods_get_dicts(tmp_path):
    class Own(Trainer):
        def forward_backward_step(self, *, input_dict, **arguments):
            kinds.append(type(input_dict))
            return super().forward_backward_step(input_dict=input_dict, **arguments)

        def post_dataloading_process(self, input_dict, labels):
            kinds.append(type(input_dict))
            return super().post_dataloading_process(input_dict, labels)

    kinds, losses = [], []
    for trainer_class in (Trainer, Own):
        folder = tmp_path / trainer_class.__name__
        trainer = make_trainer(folder, "flex", "--training.steps=2", trainer_class=trainer_class)
        trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)
        trainer.train()
        trainer.close()
    assert kinds == [dict] * 4
    assert losses[:2] == losses[2:]
