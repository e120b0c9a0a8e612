"""The engine's contract, on one process and the debug model in fp32."""

import copy
import dataclasses

import pytest
import torch

from torchtitan.components.loss import IGNORE_INDEX
from torchtitan.config import ConfigManager
from torchtitan.engine import MAX_SKIPPED_STEPS_IN_A_ROW, TrainingEngine
from torchtitan.protocols import train_spec as train_spec_module
from torchtitan.train import Trainer

VOCAB = 2048


def make_config(tmp_path, *overrides):
    return ConfigManager().parse_args(
        [
            f"--job.dump_folder={tmp_path}",
            "--training.seq_len=32",
            "--training.local_batch_size=2",
            "--training.mixed_precision_param=float32",
            "--activation_checkpoint.mode=none",
            "--lr_scheduler.warmup_steps=5",
            "--debug.seed=1",
            *overrides,
        ]
    )


def make_engine(tmp_path, *overrides) -> TrainingEngine:
    return TrainingEngine(make_config(tmp_path, *overrides))


def random_batch(rows: int, length: int, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    labels[:, ::3] = IGNORE_INDEX
    return {"input": tokens[:, :-1]}, labels


def gradients(engine) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in engine.model_parts[0].named_parameters()}


def num_valid(labels: torch.Tensor) -> int:
    return int((labels != IGNORE_INDEX).sum())


def test_gradient_is_the_same_for_one_batch_and_a_list_of_microbatches(tmp_path):
    engine = make_engine(tmp_path)
    batch, labels = random_batch(4, 32)
    denominator = num_valid(labels)
    whole = engine.forward_backward_step(
        input_dict=batch, labels=labels, global_valid_tokens=denominator
    )
    expected = gradients(engine)
    engine.optimizers.zero_grad()
    split = engine.forward_backward_step(
        input_dict=[{"input": batch["input"][i : i + 1]} for i in range(4)],
        labels=[labels[i : i + 1] for i in range(4)],
        global_valid_tokens=denominator,
    )
    assert split.item() == pytest.approx(whole.item(), rel=1e-6)
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)


def test_gradients_accumulate_until_optim_step_and_are_zeroed_by_it(tmp_path):
    engine = make_engine(tmp_path)
    batch, labels = random_batch(2, 32)
    step = dict(input_dict=batch, labels=labels, global_valid_tokens=num_valid(labels))
    engine.forward_backward_step(**step)
    once = gradients(engine)
    engine.forward_backward_step(**step)
    for name, gradient in gradients(engine).items():
        torch.testing.assert_close(gradient, 2 * once[name], rtol=1e-5, atol=1e-8)
    engine.optim_step()
    assert all(p.grad is None for p in engine.model_parts[0].parameters())


def test_forward_step_returns_outputs_in_order_for_microbatches_of_different_lengths(tmp_path):
    engine = make_engine(tmp_path)
    batches = [random_batch(1, length, seed=length)[0] for length in (5, 32, 17)]
    outputs = engine.forward_step(batches)
    assert [tuple(logits.shape) for logits in outputs] == [
        (1, 5, VOCAB),
        (1, 32, VOCAB),
        (1, 17, VOCAB),
    ]
    assert not any(logits.requires_grad for logits in outputs)
    sums = engine.forward_step(batches, output_fn=lambda logits, batch: logits.sum().item())
    assert sums == [logits.sum().item() for logits in outputs]


def test_own_loss_function_gets_logits_labels_and_the_batch(tmp_path):
    engine = make_engine(tmp_path)
    batch, labels = random_batch(2, 32)
    batch["weights"] = torch.full(labels.shape, 0.5)
    seen = {}

    def weighted(logits, labels, batch):
        seen.update(logits=logits.shape, keys=set(batch))
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none"
        )
        return (losses * batch["weights"].flatten()).sum()

    step = dict(labels=labels, global_valid_tokens=num_valid(labels))
    plain = engine.forward_backward_step(input_dict={"input": batch["input"]}, **step)
    weights = batch.pop("weights")

    def with_weights(logits, labels, batch):
        return weighted(logits, labels, {**batch, "weights": weights})

    halved = engine.forward_backward_step(input_dict=batch, loss_fn=with_weights, **step)
    assert halved.item() == pytest.approx(plain.item() / 2, rel=1e-5)
    assert seen["logits"] == (2, 32, VOCAB)


def test_unequal_numbers_of_batches_and_labels_are_refused(tmp_path):
    engine = make_engine(tmp_path)
    batch, labels = random_batch(1, 8)
    with pytest.raises(ValueError, match="2 microbatches and labels 1"):
        engine.forward_backward_step(
            input_dict=[batch, batch], labels=[labels], global_valid_tokens=1
        )


def test_optim_step_reports_norm_and_learning_rate_of_the_first_step(tmp_path):
    engine = make_engine(tmp_path, "--optimizer.lr=1e-3")
    batch, labels = random_batch(2, 32)
    engine.forward_backward_step(
        input_dict=batch, labels=labels, global_valid_tokens=num_valid(labels)
    )
    expected = torch.stack([g.double().norm() for g in gradients(engine).values()]).norm()
    result = engine.optim_step()
    assert result.grad_norm.item() == pytest.approx(expected.item(), rel=1e-5)
    assert result.lr == pytest.approx(1e-3 / 5)
    assert result.skipped is False


def poison(engine):
    for p in engine.model_parts[0].parameters():
        p.grad = torch.full_like(p, float("nan"))


def test_non_finite_gradient_is_skipped_and_leaves_the_weights(tmp_path, caplog):
    engine = make_engine(tmp_path)
    before = copy.deepcopy(engine.model_parts[0].state_dict())
    poison(engine)
    assert engine.optim_step().skipped is True
    for name, tensor in engine.model_parts[0].state_dict().items():
        assert torch.equal(tensor, before[name])
    assert "gradient norm is nan" in caplog.text


def test_too_many_skipped_steps_in_a_row_stop_the_run(tmp_path):
    engine = make_engine(tmp_path)
    for _ in range(MAX_SKIPPED_STEPS_IN_A_ROW):
        poison(engine)
        engine.optim_step()
    poison(engine)
    with pytest.raises(FloatingPointError, match="nonfinite_grad_norm"):
        engine.optim_step()


def test_non_finite_gradient_stops_where_the_config_says_stop(tmp_path):
    engine = make_engine(tmp_path, "--training.nonfinite_grad_norm=stop")
    poison(engine)
    with pytest.raises(FloatingPointError, match="lower optimizer.lr"):
        engine.optim_step()


def test_second_trainer_is_not_affected_by_first_trainers_seq_len(tmp_path):
    flavor = train_spec_module.get_train_spec("llama3").model_args["debugmodel"]
    before = copy.deepcopy(flavor)
    first = make_engine(tmp_path / "a", "--training.seq_len=16")
    second = make_engine(tmp_path / "b", "--training.seq_len=64")
    assert (first.model_args.max_seq_len, second.model_args.max_seq_len) == (16, 64)
    assert flavor == before


def test_config_is_only_read(tmp_path):
    config = make_config(tmp_path)
    before = config.to_dict()
    engine = TrainingEngine(config)
    batch, labels = random_batch(2, 32)
    engine.forward_backward_step(input_dict=batch, labels=labels, global_valid_tokens=1)
    engine.optim_step()
    assert config.to_dict() == before


def test_clients_edit_of_the_flavors_attention_reaches_the_trainer(tmp_path, monkeypatch):
    flavor = train_spec_module.get_train_spec("llama3").model_args["debugmodel"]
    monkeypatch.setattr(flavor, "attn_type", "varlen")
    monkeypatch.setattr(flavor, "attn_mask_type", "block_causal")
    engine = make_engine(tmp_path)
    assert engine.model_args.attn_type == "varlen"


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
    with pytest.raises(ValueError, match=r"feed batches yourself with forward_backward_step"):
        trainer.train()


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


def test_finished_run_that_is_started_again_does_nothing(tmp_path, caplog):
    caplog.set_level("INFO", logger="torchtitan")
    overrides = ["--training.dataset=python_docs", "--checkpoint.enable", "--training.steps=2"]
    for _ in range(2):
        trainer = Trainer(make_config(tmp_path, *overrides))
        trainer.train()
        trainer.close()
    assert trainer.step == 0
    assert "this run is complete" in caplog.text


def test_longer_run_does_not_begin_anew_over_a_weights_only_checkpoint(tmp_path):
    overrides = ["--training.dataset=python_docs", "--checkpoint.enable", "--training.steps=2"]
    trainer = Trainer(make_config(tmp_path, *overrides))
    trainer.train()
    trainer.close()
    longer = Trainer(make_config(tmp_path, *overrides[:2], "--training.steps=4"))
    with pytest.raises(ValueError, match="checkpoint.load_step to an earlier full one"):
        longer.train()
    longer.close()
