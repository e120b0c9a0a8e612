"""The engine's contract, on one process and the debug model in fp32."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch

from tests.reliability.jobs import flags_in
from torchtitan import rank_layout
from torchtitan.batch.documents import IGNORE_INDEX
from torchtitan.batch.dummy_microbatches import token_counters, without_counting
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.engine import TrainingEngine
from torchtitan.job import resolve_job
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.protocols import train_spec as train_spec_module
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.step.update import MAX_SKIPPED_STEPS_IN_A_ROW
from torchtitan.tools import host, utils
from torchtitan.tools.errors import ConfigError
from torchtitan.train import Trainer

pytestmark = [pytest.mark.usefixtures("narrow_debugmodel"), pytest.mark.long]

VOCAB = 2048


SETTINGS = flags_in("""
    training.seq_len=32 training.local_batch_size=2 training.mixed_precision_param=float32
    activation_checkpoint.mode=none lr_scheduler.warmup_steps=5 debug.seed=1
""")


def make_config(tmp_path, *overrides):
    return ConfigManager().parse_args([f"--job.dump_folder={tmp_path}", *SETTINGS, *overrides])


def make_engine(tmp_path, *overrides) -> TrainingEngine:
    return TrainingEngine(make_config(tmp_path, *overrides))


def test_engine_resolves_a_config_once_and_neither_follows_nor_allows_changes(tmp_path):
    config = make_config(tmp_path)
    resolved = resolve_job(config)
    assert resolve_job(resolved.config) is resolved
    with TrainingEngine(resolved.config) as engine:
        assert engine.job_config is resolved.config == config
    with TrainingEngine(config) as engine:
        config.training.seq_len += 1
        own = engine.job_config
        assert own.training.seq_len == config.training.seq_len - 1
        with pytest.raises(dataclasses.FrozenInstanceError, match="seq_len = 8.*copy.deepcopy"):
            own.training.seq_len = 8
        changed = copy.deepcopy(own)
        changed.training.seq_len = 8
        assert resolve_job(changed, builds_data=False).config.training.seq_len == 8


def random_batch(rows: int, length: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, ::3] = IGNORE_INDEX
    return {"input": tokens[:, :-1]}, labels


@pytest.fixture
def engine(tmp_path) -> TrainingEngine:
    return make_engine(tmp_path)


def run_backward(engine, batch, labels, n=1, **options):
    return engine.forward_backward_step(
        input_dict=batch, labels=labels, global_valid_tokens=n, **options
    )


def gradients(engine) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in engine.model_parts[0].named_parameters()}


def rounding(on_cpu: float) -> float:
    """A tolerance in fp32. The kernels of a GPU sum in orders that change with the shape."""
    return on_cpu if utils.get_device_type() == "cpu" else 10 * on_cpu


def num_valid(labels: torch.Tensor) -> int:
    return int((labels != IGNORE_INDEX).sum())


def test_gradient_is_the_same_for_one_batch_and_a_list_of_microbatches(engine):
    batch, labels = random_batch(4, 32)
    denominator = num_valid(labels)
    whole = run_backward(engine, batch, labels, denominator)
    expected = gradients(engine)
    engine.optimizers.zero_grad()
    rows = [{"input": row} for row in batch["input"].split(1)]
    split = run_backward(engine, rows, labels.split(1), denominator)
    assert split.item() == pytest.approx(whole.item(), rel=rounding(1e-6))
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=rounding(1e-7))


def test_gradients_accumulate_until_optim_step_and_are_zeroed_by_it(engine):
    batch, labels = random_batch(2, 32)
    step = dict(input_dict=batch, labels=labels, global_valid_tokens=num_valid(labels))
    engine.forward_backward_step(**step)
    once = gradients(engine)
    engine.forward_backward_step(**step)
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-5, atol=1e-8)
    engine.optim_step()
    assert all(p.grad is None for p in engine.model_parts[0].parameters())


def test_forward_step_returns_outputs_in_order_for_microbatches_of_different_lengths(engine):
    batches = [random_batch(1, length, seed=length)[0] for length in (5, 32, 17)]
    outputs = engine.forward_step(batches)
    assert [logits.shape for logits in outputs] == [(1, length, VOCAB) for length in (5, 32, 17)]
    assert not any(logits.requires_grad for logits in outputs)
    sums = engine.forward_step(batches, output_fn=lambda logits, batch: logits.sum().item())
    assert sums == [logits.sum().item() for logits in outputs]


def test_head_takes_the_place_of_logits_and_batch_entries_reach_the_loss_alone(engine):
    batch, labels = random_batch(2, 32)
    plain = run_backward(engine, batch, labels, 8)
    expected = gradients(engine)
    engine.optimizers.zero_grad()
    batch |= {"labels": labels, "advantages": torch.ones(labels.shape)}

    def minus_advantages(outputs, labels, batch):
        return -(outputs.logprobs * batch["advantages"]).sum()

    step = dict(input_dict=batch, labels=labels, global_valid_tokens=8, head=TokenLogProbs())
    losses = [engine.forward_backward_step(**step, loss_fn=fn) for fn in (None, minus_advantages)]
    close = rounding(1e-6)
    assert torch.stack(losses).tolist() == pytest.approx([plain.item()] * 2, rel=close)
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, 2 * expected[name], rtol=1e-4, atol=close)
    (outputs,) = engine.forward_step(batch, head=TokenLogProbs(chunk_tokens=7))
    assert -outputs.logprobs.sum().item() / 8 == pytest.approx(plain.item(), rel=close)


def test_unequal_numbers_of_batches_and_labels_are_refused(engine):
    batch, labels = random_batch(1, 8)
    for given in ([labels], []):
        with pytest.raises(ValueError, match=f"2 microbatches and labels for {len(given)}"):
            run_backward(engine, [batch, batch], given)


def ones(*shape):
    return torch.ones(shape, dtype=torch.int64)


# What 'input' and other entries are, the labels, and how the error names the mistake.
BAD_MICROBATCHES = [
    ({"tokens": ones(1, 4)}, ones(1, 4), r"needs 'input'.*the keys .*'tokens'"),
    ({"input": [[1, 2]]}, ones(1, 2), "needs 'input'.*got list"),
    ({"input": ones(4)}, ones(4), r"got shape \(4,\) .*input\[None\]"),
    ({"input": ones(2, 4)}, ones(2, 3), r"need labels .* got \(2, 3\) for \(2, 4\)"),
    ({"input": ones(2, 4), "positions": ones(1, 3)}, ones(2, 4),
     r"'positions' must have the shape of its 'input', \(2, 4\), or \(1, 4\) .* got \(1, 3\)"),
    ({"input": ones(2, 4), "attention_masks": ones(2, 3)}, ones(2, 4),
     r"'attention_masks' must have the shape .* got \(2, 3\)"),
    ({"input": ones(0, 4)}, ones(0, 4), r"at least one token, got shape \(0, 4\)"),
    ({"input": ones(1, 0)}, ones(1, 0), r"at least one token, got shape \(1, 0\)"),
    ({"input": VOCAB * ones(1, 4)}, ones(1, 4), rf"'input' must be ids in \[0, {VOCAB}\), got {VOCAB} "),
    ({"input": -ones(1, 4)}, ones(1, 4), r"'input' must be ids in .* got -1 to -1; "),
    ({"input": torch.ones(1, 4)}, ones(1, 4), "'input' must be whole numbers, got .*torch.float32"),
    ({"input": ones(1, 4), "positions": ones(1, 4).half()}, ones(1, 4),
     "'positions' must be whole numbers, .*float16"),
    ({"input": ones(1, 4), "document_ids": ones(1, 4).bool()}, ones(1, 4),
     "'document_ids' must be whole .*torch.bool"),
    ({"input": ones(1, 4)}, VOCAB * ones(1, 4), rf"labels must be ids in \[0, {VOCAB}\) or -100"),
    ({"input": ones(1, 4)}, torch.ones(1, 4), "labels must be whole numbers, got .*torch.float32"),
]  # fmt: skip


def test_microbatch_of_another_shape_or_with_ids_that_no_token_has_is_named_at_once(engine):
    """Before anything is computed, and before ranks wait for each other."""
    for batch, labels, message in BAD_MICROBATCHES:
        with pytest.raises(ValueError, match=message):
            run_backward(engine, batch, labels)
        with pytest.raises(ValueError, match=message):
            engine.forward_step(batch | {"labels": labels}, head=TokenLogProbs())


def test_ids_of_any_integer_type_give_the_same_loss_and_a_loss_function_its_labels(engine):
    generator = torch.Generator().manual_seed(0)
    tokens, labels = torch.randint(0, 128, (2, 2, 8), generator=generator)
    positions = torch.arange(8).expand(2, -1)

    def loss(dtype, **options):
        engine.optimizers.zero_grad()
        batch = {"input": tokens.to(dtype), "positions": positions.to(dtype)}
        return run_backward(engine, batch, labels.to(dtype), 16, **options)

    for options in ({}, {"head": TokenLogProbs()}):
        kinds = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
        assert len({loss(dtype, **options).item() for dtype in kinds}) == 1
    targets = []
    loss(
        torch.int16,
        loss_fn=lambda logits, labels, _: targets.append(labels.dtype) or logits.sum(),
    )
    assert targets == [torch.int16]


def test_step_without_labels_is_for_a_loss_that_needs_none(engine):
    step = dict(input_dict=random_batch(1, 8)[0], global_valid_tokens=1)
    with pytest.raises(ValueError, match="the default loss and head= need labels .* got None"):
        engine.forward_backward_step(**step, labels=None)
    with pytest.raises(ValueError, match=r"labels of the shape of 'input' .* None for \(1, 8\)"):
        engine.forward_step(step["input_dict"], head=TokenLogProbs())
    engine.forward_backward_step(**step, labels=None, loss_fn=lambda logits, *_: logits.sum())


def test_weighted_loss_and_its_metrics_are_sums_over_microbatches(engine):
    pairs = [random_batch(1, 8, seed) for seed in (0, 1)]

    def loss_fn(logits, labels, batch):
        losses = torch.nn.functional.cross_entropy(
            logits[0], labels[0], ignore_index=IGNORE_INDEX, reduction="none"
        )
        metrics = {"seen": num_valid(labels), "largest": -losses.max()}
        return (losses * batch["weights"]).sum(), metrics, logits

    weights = torch.rand(2, 8, generator=torch.Generator().manual_seed(0))
    batches = [
        batch | {"labels": labels, "weights": row}
        for (batch, labels), row in zip(pairs, weights, strict=True)
    ]
    logits = [x.cpu() for x in engine.forward_step(batches)]
    expected = [loss_fn(*x) for x in zip(logits, [y for _, y in pairs], batches, strict=True)]
    step = engine.forward_backward_step(
        input_dict=batches, loss_fn=loss_fn, metrics={"largest": "max", "seen": "sum"}
    )
    assert step.loss.item() == pytest.approx(sum(loss.item() for loss, _, _ in expected), rel=1e-5)
    assert {name: float(value) for name, value in step.metrics.items()} == {
        "largest": pytest.approx(max(m["largest"].item() for _, m, _ in expected), rel=1e-5),
        "seen": sum(m["seen"] for _, m, _ in expected),
    }
    assert engine.has_outputs is True and engine.pp_has_last_stage is None
    assert engine.loss_group is None and engine.from_last_stage(step.outputs) is step.outputs
    for ours, (_, _, theirs) in zip(step.outputs, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    kept = [*step.outputs, *step.metrics.values(), step.loss]
    assert not any(tensor.requires_grad for tensor in kept)

    for options, message in (
        ({}, "returned a tuple, and the call names no metrics"),
        (
            {"metrics": {"seen": "sum"}},
            r"returned the metrics \['largest', 'seen'\], and metrics= ",
        ),
        ({"metrics": {"seen": "mean"}}, "must be 'sum' or 'max', got 'mean'"),
        ({"metrics": {}, "loss_fn": lambda x, *_: (x.sum(), {"a": x})}, "metrics= names"),
        ({"metrics": {"a": "max"}, "loss_fn": lambda x, *_: (x.sum(), {"a": x})}, "be one number"),
        ({"loss_fn": None}, "needs global_valid_tokens to divide it"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.forward_backward_step(**{"input_dict": batches, "loss_fn": loss_fn} | options)


def test_backward_of_a_callers_own_forward(engine):
    backward(engine)
    expected = gradients(engine)
    engine.optimizers.zero_grad()
    batch, labels = random_batch(2, 32)
    microbatch = engine.prepare(batch | {"labels": labels})
    logits = engine.model_parts[0](microbatch.inputs, **microbatch.kwargs)
    with pytest.raises(ValueError, match="a scalar tensor computed from the outputs"):
        engine.backward(logits)
    engine.backward(engine.loss_fn(logits, microbatch.labels) / num_valid(labels))
    assert all(torch.equal(g, expected[name]) for name, g in gradients(engine).items())
    assert engine.optim_step().grad_norm > 0


def test_loss_of_one_element_is_a_scalar(engine):
    step = dict(input_dict=random_batch(1, 8)[0], labels=None, global_valid_tokens=1)
    for shape in ((), (1,), (1, 1)):
        loss_fn = lambda logits, *_, shape=shape: logits.sum().reshape(shape)  # noqa: E731
        assert engine.forward_backward_step(**step, loss_fn=loss_fn).shape == ()
    for loss_fn, got in (
        (lambda *_: torch.tensor(1.0), r"shape \[\] without a gradient"),
        (lambda logits, *_: logits[0, :2, 0], r"shape \[2\]"),
    ):
        with pytest.raises(ValueError, match=f"loss_fn must return .* got one of {got}"):
            engine.forward_backward_step(**step, loss_fn=loss_fn)
    assert engine.optim_step().grad_norm > 0


def test_denominator_that_divides_nothing_is_refused(engine):
    message = r"global_valid_tokens must be above 0 .*max\(count, 1\)"
    for denominator in (0, -1.0, math.nan, torch.tensor(0)):
        with pytest.raises(ValueError, match=message):
            run_backward(engine, *random_batch(1, 8), denominator)


def test_optim_step_reports_norm_and_learning_rate_of_the_first_step(tmp_path):
    engine = make_engine(tmp_path, "--optimizer.lr=1e-3")
    batch, labels = random_batch(2, 32)
    run_backward(engine, batch, labels, num_valid(labels))
    expected = torch.stack([g.double().norm() for g in gradients(engine).values()]).norm()
    result = engine.optim_step()
    # On the CPU norms are taken row by row; elsewhere by torch's kernel, in fp32.
    rel = 1e-5 if engine.device.type == "cpu" else 2e-4
    assert result.grad_norm.item() == pytest.approx(expected.item(), rel=rel)
    assert result.lr == pytest.approx(1e-3 / 5)
    assert result.skipped is False


def poison(engine, value: float = math.nan):
    for p in engine.model_parts[0].parameters():
        p.grad = torch.full_like(p, value)


def test_non_finite_gradient_is_skipped_and_leaves_the_weights(engine, caplog):
    before = copy.deepcopy(engine.model_parts[0].state_dict())
    for value in (math.nan, math.inf):
        backward(engine)
        poison(engine, value)
        assert engine.optim_step().skipped is True
        for name, tensor in engine.model_parts[0].state_dict().items():
            assert torch.equal(tensor, before[name])
        assert engine.weights_version == 0  # a look at what an accelerator said
        assert f"gradient norm is {value}" in caplog.text
    assert "first bad loss" not in caplog.text  # backward overflowed


def test_too_many_skipped_steps_in_a_row_stop_the_run(engine):
    for step_is_bad in (True, False):  # not in a row with those that follow
        poison(engine) if step_is_bad else backward(engine)
        engine.optim_step()
    for _ in range(MAX_SKIPPED_STEPS_IN_A_ROW):
        poison(engine)
        engine.optim_step()
    poison(engine)
    with pytest.raises(FloatingPointError, match="nonfinite_grad_norm"):
        engine.optim_step()
        engine.weights_version  # noqa: B018 (on an accelerator the error comes with a look)


def test_non_finite_gradient_stops_where_the_config_says_stop(tmp_path):
    engine = make_engine(tmp_path, "--training.nonfinite_grad_norm=stop")
    poison(engine)
    with pytest.raises(FloatingPointError, match="lower optimizer.lr"):
        engine.optim_step()
        engine.weights_version  # noqa: B018 (as above)


def sum_times(factor):
    return lambda logits, labels, batch: logits.sum() * factor


def test_skipped_step_names_the_first_bad_microbatch_and_its_documents(tmp_path, caplog):
    engine = make_engine(tmp_path, "--training.nonfinite_grad_norm=skip")
    for step, bad in enumerate([(), (1, 2), ()], start=1):
        for number in range(3):
            batch, labels = random_batch(2, 32, number)
            batch["input"].sample_ids = torch.tensor([[number, number + 5], [7, 7]])
            factor = math.nan if number in bad else 1.0
            run_backward(engine, batch, labels, loss_fn=sum_times(factor))
        engine.step = step
        engine.optim_step()
    engine.save(str(tmp_path / "end"))  # an accelerator's verdict is read here at the latest
    warnings = [record.message for record in caplog.records if "step 2: " in record.message]
    assert warnings == [
        "step 2: the first bad loss of rank 0, nan, is that of microbatch 2 of 3, row 1 (documents 1 "
        "to 6), row 2 (document 7)",
        "step 2: the gradient norm is nan, 1 time(s) in a row (ranks with a bad loss have logged its "
        "microbatch; if there is none, a gradient overflowed); weights and optimizer state were left as "
        "they are",
    ]


def test_first_bad_microbatch_after_a_loss_of_the_callers_own_has_its_own_documents(engine, caplog):
    batch, labels = random_batch(2, 32, 0)
    with engine.train_context(), engine.maybe_enable_amp:
        microbatch = engine.prepare(batch, labels)
        own = engine.model_parts[0](microbatch.inputs, **microbatch.kwargs).sum()
    engine.backward(own)
    for number, factor in ((1, math.nan), (2, 1.0)):
        batch["input"].sample_ids = torch.tensor([[number, number], [7, 7]])
        run_backward(engine, batch, labels, loss_fn=sum_times(factor))
    engine.optim_step()
    assert engine.weights_version == 0
    assert (
        "nan, is that of microbatch 2 of 3, row 1 (document 1), row 2 (document 7)" in caplog.text
    )


def backward(engine, seed: int = 0):
    batch, labels = random_batch(2, 32, seed)
    return run_backward(engine, batch, labels, num_valid(labels))


def test_learning_rate_of_one_step_leaves_the_schedule_alone(tmp_path):
    engine = make_engine(tmp_path, "--optimizer.lr=1e-3", "--optimizer.weight_decay=0")
    before = copy.deepcopy(dict(engine.model_parts[0].named_parameters()))
    assert engine.lr == pytest.approx(1e-3 / 5)
    backward(engine)
    assert engine.optim_step(lr=0.0).lr == 0.0
    for name, p in engine.model_parts[0].named_parameters():
        assert torch.equal(p, before[name])
    assert engine.lr == pytest.approx(2e-3 / 5)
    # A number, however it comes: a tensor would stay, and be saved.
    backward(engine)
    result = engine.optim_step(lr=torch.tensor(0.5))
    assert (result.lr, type(result.lr)) == (0.5, float)
    assert engine.lr == pytest.approx(3e-3 / 5)


def test_arguments_that_would_make_weights_useless_are_refused(engine):
    backward(engine)
    lrs = [("lr", value) for value in (-1e-3, math.nan, math.inf)]
    for name, value in (*lrs, ("max_norm", 0), ("max_norm", torch.tensor(-1.0))):
        with pytest.raises(ValueError, match=f"optim_step's {name} must be .*; correct it"):
            engine.optim_step(**{name: value})
    assert engine.optim_step().grad_norm > 0  # the gradients are still there


def test_max_norm_of_one_step_replaces_that_of_the_config(engine):
    seen = []
    engine.optimizers.register_step_pre_hook(
        lambda *_: seen.append(torch.stack([g.norm() for g in gradients(engine).values()]).norm())
    )
    for max_norm in (0.25, float("inf")):
        backward(engine)
        result = engine.optim_step(max_norm=max_norm)
        # Clipping adds 1e-6 to the norm that it divides by.
        expected = min(max_norm, result.grad_norm.item())
        assert seen.pop().item() == pytest.approx(expected, rel=1e-4)


def test_deferred_denominator_gives_the_gradient_of_the_denominator_known_before(tmp_path):
    engine = make_engine(tmp_path, "--training.max_norm=1e9")
    batch, labels = random_batch(2, 32)
    norms = []
    for divide_by, later in ((num_valid(labels), None), (1, torch.tensor(num_valid(labels)))):
        run_backward(engine, batch, labels, divide_by)
        norms.append(engine.optim_step(lr=0.0, denominator=later).grad_norm.item())
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)
    nothing = {"input_dict": [], "labels": [], "global_valid_tokens": 1}
    engine.forward_backward_step(**nothing)
    assert engine.optim_step(denominator=0).grad_norm.item() == 0
    run_backward(engine, batch, labels, divide_by)
    undivided = engine.optim_step(lr=0.0, denominator=0).grad_norm.item()
    assert undivided == pytest.approx(norms[0] * num_valid(labels), rel=1e-5)
    for denominator in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="denominator must add up to a finite number"):
            engine.optim_step(denominator=denominator)


def test_denominators_of_ranks_are_reduced_as_their_gradients_are(engine, monkeypatch):
    """Two ranks give 2 and 6: sums of gradients are divided by the sum, means by the mean."""
    engine.update.dp_group = SimpleNamespace(size=lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total, group: total.add_(6.0))
    norm = math.sqrt(sum(p.numel() for p in engine.model_parts[0].parameters()))
    for reduction, divisor in (("sum", 8), ("mean", 4)):
        training = engine.update.training
        engine.update.training = dataclasses.replace(training, gradient_reduction=reduction)
        poison(engine, 1.0)
        result = engine.optim_step(denominator=2.0)
        assert result.grad_norm.item() == pytest.approx(norm / divisor, rel=1e-5)


def test_what_comes_too_late_is_refused_where_weights_are_updated_in_backward(tmp_path):
    engine = make_engine(tmp_path, "--optimizer.early_step_in_backward")
    with pytest.raises(ValueError, match=r"optim_step\(lr=...\) comes too late"):
        engine.optim_step(lr=1e-3)
    batch, labels = random_batch(2, 32)
    with pytest.raises(ValueError, match="a step has one microbatch, got number 2"):
        run_backward(engine, [batch, batch], [labels, labels])
    with pytest.raises(IndexError):
        run_backward(engine, batch, labels, loss_fn=lambda *_: [][0])
    for _ in range(2):
        backward(engine)
        with pytest.raises(ValueError, match=r"got number 2 before optim_step\(\)"):
            backward(engine)
        engine.optim_step()


@pytest.mark.parametrize("flags", [(), ("--optimizer.early_step_in_backward",)], ids=str)
def test_update_waits_for_a_save_that_is_still_copying(flags, tmp_path, monkeypatch):
    engine = make_engine(tmp_path, *flags)
    (weight, *_) = engine.model_parts[0].parameters()
    before, waited_with = weight.clone(), []
    monkeypatch.setattr(
        engine.checkpointer, "maybe_wait_for_staging", lambda: waited_with.append(weight.clone())
    )
    backward(engine)
    if not flags:  # backward changes nothing
        assert not waited_with
        engine.optim_step()
    assert waited_with and torch.equal(waited_with[0], before) and not torch.equal(weight, before)


def test_modes_hold_at_once_and_end_with_their_block(engine):
    (model,) = engine.model_parts
    model.norm.eval()  # a client's choice for one module
    with engine.eval_mode():
        assert not any(module.training for module in model.modules())
        with engine.train_mode():
            assert all(module.training for module in model.modules())
        assert not any(module.training for module in model.modules())
    assert model.training and not model.norm.training
    engine.eval_mode()
    assert not model.training


def test_lists_may_be_empty(engine):
    assert engine.forward_step([]) == []
    assert run_backward(engine, [], []) == 0
    assert engine.optim_step().grad_norm == 0


def test_step_without_a_gradient_is_refused_and_one_with_a_clients_own_is_not(engine):
    with pytest.raises(ValueError, match="found no gradient on any rank; call forward_backward"):
        engine.optim_step()
    assert engine.weights_version == 0 and engine.lr_schedulers.last_epoch == 0
    for parameter in engine.model_parts[0].parameters():
        parameter.grad = torch.zeros_like(parameter)
    engine.optim_step()
    backward(engine)
    engine.optimizers.zero_grad()
    engine.optim_step()  # of no gradient: of a backward pass whose gradients were dropped
    with pytest.raises(ValueError, match="found no gradient"):
        engine.optim_step()


def test_engine_closes_itself_at_the_end_of_its_block_and_takes_no_step_then(tmp_path, monkeypatch):
    batch, labels = random_batch(1, 8)
    with make_engine(tmp_path) as engine:
        closed = []
        monkeypatch.setattr(engine.checkpointer, "close", lambda: closed.append(True))
    assert closed
    step = {"input_dict": batch, "labels": labels, "global_valid_tokens": 1}
    for name, call in {
        "forward_step": lambda: engine.forward_step(batch),
        "forward_backward_step": lambda: engine.forward_backward_step(**step),
        "optim_step": engine.optim_step,
    }.items():
        with pytest.raises(
            RuntimeError, match=rf"^{name} was called after close\(\), .* build a new"
        ):
            call()


def test_head_that_is_no_instance_is_named(engine):
    batch, labels = random_batch(1, 8)
    for head, got in ((TokenLogProbs, "<class .*TokenLogProbs'>"), ("x", "'x'")):
        message = rf"such as TokenLogProbs\(\), got {got}; give an inst"
        with pytest.raises(ValueError, match=message):
            engine.forward_step(batch | {"labels": labels}, head=head)


def test_skipped_and_failed_steps_forget_how_many_tokens_each_expert_got(tmp_path):
    engine = make_engine(tmp_path, "--model.name=qwen3", "--model.flavor=debugmodel_moe_small")
    backward(engine)
    counters = token_counters(engine.model_parts)
    assert counters and all(counter.sum() > 0 for counter in counters)
    poison(engine)
    assert engine.optim_step().skipped
    assert all(counter.sum() == 0 for counter in counters)
    with pytest.raises(ZeroDivisionError), without_counting(engine.model_parts):
        counters[0].add_(1)
        raise ZeroDivisionError
    assert counters[0].sum() == 0
    with pytest.raises(ZeroDivisionError):
        run_backward(engine, *random_batch(2, 32), loss_fn=lambda *_: 1 / 0)
    assert all(counter.sum() == 0 for counter in counters)


def test_failure_before_fsdps_first_forward_is_the_error_that_is_raised(tmp_path):
    engine = make_engine(tmp_path, "--parallelism.always_fsdp=True")
    batch, labels = random_batch(2, 32)
    padding = torch.ones(2, 32).index_fill(1, torch.tensor([1]), 0)
    with pytest.raises(ValueError, match="padding mask"):
        run_backward(engine, batch | {"attention_masks": padding}, labels)
    backward(engine)  # the engine goes on


def test_failing_cleanup_is_logged_and_the_first_error_raised(engine, monkeypatch, caplog):

    def lose_device():
        raise RuntimeError("the device is lost")

    monkeypatch.setattr(engine.update, "forget_microbatches", lose_device)
    batch, labels = random_batch(2, 32)
    with pytest.raises(ZeroDivisionError):
        run_backward(engine, batch, labels, loss_fn=lambda *_: 1 / 0)
    assert "cleaning up after the error below failed" in caplog.text
    assert "the device is lost" in caplog.text


def names_of_steps(tmp_path) -> set[str]:
    return {path.name for path in (tmp_path / "checkpoint").iterdir()}


def test_steps_on_top_of_a_loaded_checkpoint_are_saved_beside_it(tmp_path, caplog):
    flags = "--checkpoint.enable", "--training.nonfinite_grad_norm=skip"
    with make_engine(tmp_path, *flags) as engine:
        backward(engine)
        poison(engine)
        engine.optim_step()  # a step that makes no version
        backward(engine)
        engine.optim_step()
        engine.step = 5  # counted by its caller
        engine.save()
    for n in (6, 7):
        with make_engine(tmp_path, *flags) as engine:
            assert engine.load()
            backward(engine)
            engine.optim_step()
            engine.save()
            assert f"step-{n}" in names_of_steps(tmp_path)
            if n == 7:
                poison(engine)
                engine.optim_step()
                engine.weights_version  # noqa: B018 (as above)
                assert "step 8: the gradient norm is nan" in caplog.text
                engine.step = 20
                engine.save()
    assert names_of_steps(tmp_path) == {"step-5", "step-6", "step-7", "step-20"}


def test_load_of_weights_alone_is_a_new_version_and_a_full_load_the_saved_one(tmp_path):
    folder = str(tmp_path / "saved")
    flags = ("--checkpoint.enable",)
    with make_engine(tmp_path / "a", *flags) as engine:
        for _ in range(3):
            backward(engine)
            engine.optim_step()
        engine.save(folder)
        engine.load(folder, model_only=True)
        assert engine.weights_version == 4
        engine.save()
        assert names_of_steps(tmp_path / "a") == {"step-3"}
        engine.load(folder)
        assert engine.weights_version == 3
        engine.checkpointer.exclude_from_loading = ["train_state"]
        engine.load(folder)
        assert engine.weights_version == 4
        with pytest.raises(FileNotFoundError):
            engine.load(str(tmp_path / "nowhere"))
        assert engine.weights_version == 4


def test_load_brings_optimizer_state_where_it_was_put(engine, tmp_path):
    backward(engine)
    engine.optim_step()
    engine.save(str(tmp_path / "saved"))
    # As on an accelerator after to("cpu", optimizer=False); "meta" stands for it.
    engine.offloader.places["optimizer"] = torch.device("meta")
    engine.load(str(tmp_path / "saved"))
    assert all(state["exp_avg"].is_meta for state in engine.optimizers.state.values())


@pytest.mark.parametrize(("local_rank", "expected"), [(None, 3), ("1", 1)])
def test_without_a_launcher_the_device_is_the_one_of_the_host(local_rank, expected, monkeypatch):
    class Accelerator:
        current = 3

        def current_device(self):
            return self.current

        def device_count(self):
            return 4

        def set_device(self, index):
            self.current = index

    accelerator = Accelerator()
    monkeypatch.setattr(host, "_engines", set())  # nothing is on loan
    monkeypatch.setattr(utils, "get_device_info", lambda: ("cuda", accelerator))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert rank_layout.set_device() == torch.device("cuda", expected)
    assert accelerator.current == expected


@pytest.mark.parametrize(
    "device, replicas, wanted, expected",
    [
        ("cpu", 1, None, False),
        ("cuda", 1, None, True),
        ("cuda", 2, None, False),  # DDP
        ("cuda", 1, False, False),
        ("cpu", 1, True, True),
    ],
)
def test_fsdp_holds_the_parameters_of_one_accelerator(device, replicas, wanted, expected):
    config = JobConfig()
    config.parallelism.always_fsdp = wanted
    config.parallelism.data_parallel_replicate_degree = replicas
    spec = get_train_spec("llama3")
    assert rank_layout.is_fsdp_wanted_always(config, spec, torch.device(device)) is expected


def test_one_accelerator_leaves_a_clients_own_parallelize_function_its_autocast():
    spec = dataclasses.replace(get_train_spec("llama3"), parallelize_fn=lambda model, *_: model)
    assert rank_layout.is_fsdp_wanted_always(JobConfig(), spec, torch.device("cuda")) is False


def test_documents_longer_than_seq_len_get_a_longer_rope_table(tmp_path):
    flavor = copy.deepcopy(train_spec_module.get_train_spec("llama3").model_args["debugmodel"])
    short = make_engine(tmp_path / "a", "--training.seq_len=16")
    long = make_engine(tmp_path / "b", "--training.seq_len=64")
    batch, labels = random_batch(1, 40)
    packed = {"input": batch["input"][:, :16], "positions": torch.arange(20, 36)[None]}
    for inputs in (batch, packed):
        ours, theirs = short.forward_step(inputs)[0], long.forward_step(inputs)[0]
        assert torch.equal(ours, theirs)
    assert (short.model_args.max_seq_len, long.model_args.max_seq_len) == (16, 64)
    assert train_spec_module.get_train_spec("llama3").model_args["debugmodel"] == flavor
    run_backward(short, batch, labels)


def test_own_loop_may_average_but_a_trainer_with_data_counts_over_all_ranks(tmp_path):
    config = make_config(
        tmp_path, "--training.dataset=python_docs", "--training.gradient_reduction=mean"
    )
    with pytest.raises(ConfigError, match="gradient_reduction = 'mean' .* set it to 'sum'"):
        Trainer(config)
    TrainingEngine(config).close()


def test_trainer_without_dataloader_says_how_to_feed_batches(tmp_path, monkeypatch):
    spec = dataclasses.replace(
        train_spec_module.get_train_spec("llama3"),
        build_dataloader_fn=None,
        build_tokenizer_fn=None,
        build_validator_fn=None,
    )
    monkeypatch.setattr(train_spec_module, "get_train_spec", lambda name: spec)
    trainer = Trainer(make_config(tmp_path))
    assert trainer.dataloader is None and trainer.tokenizer is None
    for call in (trainer.train, lambda: trainer.batch_generator(trainer.dataloader)):
        with pytest.raises(ValueError, match=r"feed batches yourself with forward_backward_step"):
            call()


def test_finite_data_that_runs_out_saves_what_was_learned(tmp_path):
    class TwoBatches:
        def __iter__(self):
            yield from [random_batch(2, 32, seed) for seed in range(2)]

        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            pass

    trainer = Trainer(
        make_config(tmp_path, "--training.dataset=python_docs", "--checkpoint.enable")
    )
    trainer.dataloader = TwoBatches()
    trainer.train()
    trainer.close()
    assert trainer.step == 2
    assert (tmp_path / "checkpoint" / "step-2" / ".metadata").exists()


def test_finished_run_that_is_started_again_does_nothing_or_needs_a_full_checkpoint(
    tmp_path, caplog
):
    caplog.set_level("INFO", logger="torchtitan")
    flags = ["--training.dataset=python_docs", "--checkpoint.enable"]
    for _ in range(2):
        trainer = Trainer(make_config(tmp_path, *flags, "--training.steps=2"))
        trainer.train()
        trainer.close()
    assert trainer.step == 0
    assert "this run is complete" in caplog.text
    with Trainer(make_config(tmp_path, *flags, "--training.steps=4")) as longer:
        with pytest.raises(ValueError, match="checkpoint.load_step to an earlier full one"):
            longer.train()


def test_checkpoints_are_saved_and_loaded_between_backward_and_step(tmp_path):
    """Torch makes no optimizer state for parameters with gradients before the first step."""
    engine = make_engine(tmp_path)
    backward(engine)
    engine.save(str(tmp_path / "before"))
    engine.optim_step()
    backward(engine)
    engine.save(str(tmp_path / "after"))
    engine.optim_step()
    other = make_engine(tmp_path / "other")
    backward(other)
    for name, version in (("after", 1), ("before", 0), ("after", 1)):
        assert other.load(str(tmp_path / name)) and other.weights_version == version
        # Those of the weights before.
        assert all(parameter.grad is None for parameter in other.model_parts[0].parameters())
        backward(other)
    other.optim_step()
    for name, parameter in engine.model_parts[0].named_parameters():
        assert torch.equal(parameter, other.model_parts[0].get_parameter(name)), name


# ---- what is said once ----


def test_update_with_learning_rate_0_is_warned_of_once_per_engine(tmp_path, caplog):
    batch, labels = random_batch(2, 8)
    for _ in range(2):
        caplog.clear()
        with make_engine(tmp_path, "--lr_scheduler.step_offset=-1") as engine:
            before = [p.detach().clone() for p in engine.model_parts[0].parameters()]
            for lr in (None, 0.0):
                run_backward(engine, batch, labels)
                assert engine.optim_step(lr=lr).lr == 0
            assert all(map(torch.equal, before, engine.model_parts[0].parameters()))
        assert caplog.text.count("an update with learning rate 0 changes no weight") == 1


def test_each_engine_tells_once_that_two_sources_of_boundaries_disagree(tmp_path, caplog):
    flags = "--model.attn_type=varlen", "--model.attn_mask_type=position_block_causal"
    batch, labels = random_batch(2, 8)
    lengths = {"seq_lens": torch.tensor([[5, 3], [8, 0]])}
    alike = batch | lengths | {"cu_seqlens": torch.tensor([0, 5, 8, 16])}
    other = batch | lengths | {"cu_seqlens": torch.tensor([0, 4, 8, 16])}
    with make_engine(tmp_path, *flags) as first, make_engine(tmp_path, *flags) as second:
        told = []
        for engine, given in ((first, other), (second, alike), (second, other)) * 2:
            caplog.clear()
            engine.forward_step(given)
            told.append(["they disagree" in message for message in caplog.messages])
    assert told == [[True], [False], [True], [], [], []]


def test_converters_hook_runs_between_the_update_and_zeroing_and_not_after_a_load(
    tmp_path, monkeypatch
):
    with make_engine(tmp_path) as engine:
        (part,), seen = engine.model_parts, []
        weights = [p.detach().clone() for p in part.parameters()]

        def note(parts):
            changed = not all(map(torch.equal, weights, part.parameters()))
            seen.append((parts == [part], changed, all(p.grad.any() for p in part.parameters())))

        monkeypatch.setattr(engine.model_converters, "post_optimizer_hook", note)
        batch, labels = random_batch(2, 8)
        for denominator in (1.0, math.nan):  # the second step is skipped
            run_backward(engine, batch, labels)
            if denominator != 1.0:
                next(part.parameters()).grad.fill_(math.nan)
            engine.optim_step()
        engine.save(f"{tmp_path}/saved")
        engine.load(f"{tmp_path}/saved")
        assert seen == [(True, True, True)]


def test_log_says_once_what_keeping_documents_apart_does_to_the_loss(tmp_path, caplog):
    caplog.set_level("INFO", logger="torchtitan")
    for flags, part in (
        ((), "with training.mask_boundary_loss = true labels of the next document are left out"),
        (("--training.mask_boundary_loss=False",), "labels of the next document are in the loss"),
        (("--model.attn_type=sdpa", "--model.attn_mask_type=causal"), None),
    ):
        caplog.clear()
        kept_apart = "--model.attn_type=varlen", "--model.attn_mask_type=block_causal"
        with make_engine(tmp_path, *kept_apart, *flags):
            told = [text for text in caplog.messages if "keeps documents apart" in text]
        assert [part in text for text in told] == ([] if part is None else [True])
