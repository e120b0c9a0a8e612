import time
from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torchtitan.callbacks.metrics import MetricsProcessor
from torchtitan.callbacks.validate import BaseValidator, Validator, build_validator
from torchtitan.config import JobConfig
from torchtitan.data import text_datasets
from torchtitan.data.tokenizer import build_hf_tokenizer
from torchtitan.distributed import ParallelDims
from torchtitan.loss.cross_entropy import IGNORE_INDEX, cross_entropy_loss
from torchtitan.testing.gloo import run_ranks

ONE_PROCESS = SimpleNamespace(  # without a process group
    pp_enabled=False,
    cp_enabled=False,
    non_data_parallel_size=1,
    get_optional_mesh=lambda name: None,
)
VOCAB = 11
BATCH = 2
SEQ_LEN = 4


class FakeDataloader:
    """Serves a list of batches, each time from its start."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    state_dict, load_state_dict = mock.Mock(), mock.Mock()


def make_batch(seed: int, num_ignored: int = 0):
    """Return tokens [BATCH, SEQ_LEN], and labels whose first `num_ignored` columns are ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (BATCH, SEQ_LEN + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, :num_ignored] = IGNORE_INDEX
    return {"input": tokens[:, :-1]}, labels


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, 8)
        self.dropout = nn.Dropout(0.5)
        self.output = nn.Linear(8, VOCAB)
        self.modes = []

    def forward(self, tokens):
        self.modes.append(self.training)
        return self.output(self.dropout(self.embedding(tokens)))


class RecordingProcessor(MetricsProcessor):
    """Records what validation reports."""

    def log_validation(self, loss, step, extra_metrics=None):
        self.reported = getattr(self, "reported", [])
        self.reported.append((step, loss, self.ntokens_since_last_log))
        super().log_validation(loss, step, extra_metrics)


def job(**options) -> JobConfig:
    config = JobConfig()
    config.validation.local_batch_size = BATCH
    config.validation.seq_len = SEQ_LEN
    for key, value in options.items():
        setattr(config.validation, key, value)
    return config


def validator_of(
    batches=None, parallel_dims=None, config=None, tokenizer=None, loss_fn=cross_entropy_loss
) -> Validator:
    """Return a validator; batches: take the place of the dataset's."""
    config, parallel_dims = config or job(), parallel_dims or ONE_PROCESS
    build = mock.Mock(wraps=text_datasets.build_text_validation_dataloader)
    if batches is not None:
        build = mock.Mock(return_value=FakeDataloader(batches))
    with mock.patch.object(text_datasets, "build_text_validation_dataloader", build):
        validator = build_validator(
            job_config=config,
            dp_world_size=1,
            dp_rank=0,
            tokenizer=tokenizer,
            parallel_dims=parallel_dims,
            loss_fn=loss_fn,
            validation_context=nullcontext,
            maybe_enable_amp=nullcontext(),
            metrics_processor=RecordingProcessor(config, parallel_dims),
        )
    validator.asked_for = build.call_args.kwargs
    return validator


def mean_loss(model: nn.Module, batches) -> float:
    """Return the mean over every valid token of all batches, computed one token at a time."""
    model.eval()
    losses = []
    for input_dict, labels in batches:
        log_probs = model(input_dict["input"]).double().log_softmax(-1)
        for row, column in (labels != IGNORE_INDEX).nonzero():
            losses.append(-log_probs[row, column, labels[row, column]].item())
    return sum(losses) / len(losses)


UNEVEN = [make_batch(0), make_batch(1, num_ignored=3), make_batch(2, num_ignored=4)]


def test_loss_is_the_mean_over_all_tokens_not_over_batch_means():
    validator = validator_of(UNEVEN)
    validator.validate([Model()], step=5)
    ((step, loss, num_tokens),) = validator.metrics_processor.reported
    assert step == 5
    assert loss == pytest.approx(mean_loss(Model(), UNEVEN), rel=1e-6)
    assert num_tokens == 3 * BATCH * SEQ_LEN


def test_only_the_asked_number_of_batches_is_read():
    endless = validator_of(UNEVEN, config=job(steps=2))
    endless.validate([Model()], step=1)
    ((_, loss, _),) = endless.metrics_processor.reported
    assert loss == pytest.approx(mean_loss(Model(), UNEVEN[:2]), rel=1e-6)
    assert endless.asked_for["infinite"] is True
    assert validator_of(UNEVEN).asked_for["infinite"] is False


def test_every_module_gets_back_its_own_training_flag_even_after_an_error():
    model = Model()
    model.dropout.eval()
    validator = validator_of(UNEVEN)
    validator.validate([model], step=1)
    assert model.modes == [False] * 3
    assert model.training and model.output.training and not model.dropout.training

    validator.loss_fn = mock.Mock(side_effect=RuntimeError("broken loss"))
    with pytest.raises(RuntimeError, match="broken loss"):
        validator.validate([model], step=2)
    assert model.training and model.output.training and not model.dropout.training


def test_validation_builds_no_graph_and_leaves_no_gradient():
    model = Model()
    loss_fn = mock.Mock(wraps=cross_entropy_loss)
    validator_of(UNEVEN, loss_fn=loss_fn).validate([model], step=1)
    assert [call.args[0].requires_grad for call in loss_fn.call_args_list] == [False] * 3
    assert all(p.grad is None for p in model.parameters())


def test_training_throughput_does_not_notice_validation():
    validator = validator_of(UNEVEN)
    processor = validator.metrics_processor
    processor.ntokens_since_last_log = 77
    processor.data_loading_times = [0.25]
    processor.time_last_log -= 1000.0
    since_last_log = time.perf_counter() - processor.time_last_log
    validator.validate([Model()], step=1)
    assert processor.ntokens_since_last_log == 77
    assert processor.data_loading_times == [0.25]
    # The clock continues from where validation began, without the time of validation.
    now = time.perf_counter() - processor.time_last_log
    assert now == pytest.approx(since_last_log, abs=0.2)


@pytest.mark.parametrize("batches", [[], [make_batch(0, num_ignored=SEQ_LEN)]])
def test_data_without_a_valid_token_are_a_warning_not_a_division_by_zero(batches, caplog):
    validator = validator_of(batches)
    validator.validate([Model()], step=1)
    assert not hasattr(validator.metrics_processor, "reported")
    assert "no token with a label" in caplog.text


def test_first_step_and_every_nth_are_validated():
    validator = BaseValidator(job(freq=4))
    assert [step for step in range(1, 10) if validator.should_validate(step)] == [1, 4, 8]
    with pytest.raises(NotImplementedError, match="BaseValidator must define validate"):
        validator.validate([], 1)


class MaskedModel(Model):
    """Takes masks, and the batch's other entries."""

    model_args = SimpleNamespace(attn_type="flex")

    def get_attention_masks(self, input_batch, tokenizer, extra_inputs):
        return ("masks", input_batch.shape, tokenizer, sorted(extra_inputs))

    def forward(self, tokens, positions, attention_masks):
        self.seen = attention_masks, positions
        return super().forward(tokens)


def test_model_that_masks_gets_its_masks_and_the_other_entries():
    (input_dict, labels) = make_batch(0)
    positions = torch.arange(SEQ_LEN).expand(BATCH, SEQ_LEN)
    batch = {**input_dict, "positions": positions, "source": "text"}
    validator = validator_of([], tokenizer="tokenizer")
    model = MaskedModel()
    inputs, same_labels, extra_inputs, extra_kwargs = validator.post_dataloading_process(
        batch, labels, [model]
    )
    assert inputs is batch["input"] and same_labels is labels
    assert extra_inputs == {"positions": positions, "source": "text"}
    expected = ("masks", inputs.shape, "tokenizer", ["positions", "source"])
    assert extra_kwargs == {"attention_masks": expected}

    del batch["source"]
    validator.validation_dataloader = FakeDataloader([(batch, labels)])
    validator.validate([model], step=1)
    assert model.seen[0][0] == "masks" and torch.equal(model.seen[1], positions)


def test_every_validation_reads_the_same_batches_of_a_real_dataset():
    config = job(dataset="c4_test", steps=2)
    tokenizer, echo = build_hf_tokenizer(config), nn.Identity()
    validator = validator_of(
        config=config, tokenizer=tokenizer, loss_fn=lambda pred, labels: pred.sum().double()
    )
    for step in (1, 2, 3):
        validator.validate([echo], step)
    losses = [loss for _, loss, _ in validator.metrics_processor.reported]
    assert losses[0] > 0 and losses == [losses[0]] * 3


# --- ranks ----------------------------------------------------------------------------------


def validate_sharded(batches_of_rank) -> float:
    """Return this rank's reported loss with the model sharded over all ranks."""
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    dims = ParallelDims(1, world_size, 1, 1, 1, 1, 1, world_size=world_size)
    model = Model()
    fully_shard(model.embedding, mesh=dims.get_mesh("fsdp"))
    fully_shard(model, mesh=dims.get_mesh("fsdp"))
    validator = validator_of(batches_of_rank[rank], parallel_dims=dims)
    validator.validate([model], step=1)
    # Every parameter is sharded again, for a later save or optimizer step.
    assert all(isinstance(p, DTensor) for p in model.parameters())
    ((_, loss, _),) = validator.metrics_processor.reported
    return loss


@pytest.mark.parametrize(
    "batches_of_rank",
    [[UNEVEN, UNEVEN[:1]], [[], UNEVEN]],
    ids=["uneven", "one_without_data"],
)
def test_ranks_with_any_number_of_batches_agree_on_the_mean_over_all_tokens(batches_of_rank):
    losses = run_ranks(validate_sharded, 2, batches_of_rank)
    expected = mean_loss(Model(), [batch for batches in batches_of_rank for batch in batches])
    assert losses == pytest.approx([expected] * 2, rel=1e-6)
