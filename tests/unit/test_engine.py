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
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.config.job_config import Parallelism
from torchtitan.engine import TrainingEngine
from torchtitan.job import resolve_job
from torchtitan.loss.logprobs import TokenLogProbs
from torchtitan.protocols import train_spec as train_spec_module
from torchtitan.protocols.train_spec import get_train_spec
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


BATCH, LABELS = random_batch(1, 8)
NO_SCALAR = "loss_fn must return .* got one of shape"
# Arguments of forward_backward_step, and how the error names the mistake.
WRONG_ARGUMENTS = [
    ({"input_dict": [BATCH, BATCH], "labels": []}, "2 microbatches, but labels for 0"),
    ({"labels": None}, "the default loss and head= need labels .* got None"),
    *(
        ({"global_valid_tokens": n}, r"global_valid_tokens must be above 0 .*max\(count, 1\)")
        for n in (0, -1.0, math.nan, torch.tensor(0))
    ),
    ({"head": TokenLogProbs}, r"such as TokenLogProbs\(\), got <class .*TokenLogProbs'>; give an"),
    ({"head": "x"}, r"such as TokenLogProbs\(\), got 'x'; give an inst"),
    ({"loss_fn": lambda *_: torch.tensor(1.0)}, rf"{NO_SCALAR} \[\] without a gradient"),
    ({"loss_fn": lambda logits, *_: logits[0, :2, 0]}, rf"{NO_SCALAR} \[2\]"),
]


def test_wrong_labels_denominator_head_or_loss_is_named(engine):
    right = {"input_dict": BATCH, "labels": LABELS, "global_valid_tokens": 1}
    for wrong, message in WRONG_ARGUMENTS:
        with pytest.raises(ValueError, match=message):
            engine.forward_backward_step(**(right | wrong))


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
    ({"input": ones(1, 0)}, ones(1, 0), r"at least one token, got shape \(1, 0\)"),
    ({"input": VOCAB * ones(1, 4)}, ones(1, 4), rf"'input' must be ids in \[0, {VOCAB}\), got {VOCAB} "),
    ({"input": -ones(1, 4)}, ones(1, 4), r"'input' must be ids in .* got -1 to -1; "),
    ({"input": torch.ones(1, 4)}, ones(1, 4), "'input' must be whole numbers, got .*torch.float32"),
    ({"input": ones(1, 4), "positions": ones(1, 4).half()}, ones(1, 4),
     "'positions' must be whole numbers, .*float16"),
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
    loss(torch.int16, loss_fn=lambda x, labels, _: targets.append(labels.dtype) or x.sum())
    assert targets == [torch.int16]


def test_step_without_labels_is_for_a_loss_that_needs_none(engine):
    with pytest.raises(ValueError, match=r"labels of the shape of 'input' .* None for \(1, 8\)"):
        engine.forward_step(BATCH, head=TokenLogProbs())
    engine.forward_backward_step(input_dict=BATCH, loss_fn=lambda logits, *_: logits.sum())


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
    largest, seen = (float(step.metrics[name]) for name in sorted(step.metrics))
    assert largest == pytest.approx(max(m["largest"].item() for _, m, _ in expected), rel=1e-5)
    assert seen == sum(m["seen"] for _, m, _ in expected)
    assert engine.has_outputs is True and engine.pp_has_last_stage is None
    assert engine.loss_group is None and engine.from_last_stage(step.outputs) is step.outputs
    for ours, (_, _, theirs) in zip(step.outputs, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
    kept = [*logits, *step.outputs, *step.metrics.values(), step.loss]
    assert not any(tensor.requires_grad for tensor in kept)

    for options, message in (
        ({}, "returned a tuple, but the call has no metrics argument"),
        ({"metrics": {"seen": "sum"}}, r"the metrics \['largest', 'seen'\], but metrics= "),
        ({"metrics": {"seen": "mean"}}, "must be 'sum' or 'max', got 'mean'"),
        ({"metrics": {}, "loss_fn": lambda x, *_: (x.sum(), {"a": x})}, "metrics= names"),
        ({"metrics": {"a": "max"}, "loss_fn": lambda x, *_: (x.sum(), {"a": x})}, "be one number"),
        ({"loss_fn": None}, "which global_valid_tokens divides"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.forward_backward_step(**{"input_dict": batches, "loss_fn": loss_fn} | options)


def test_loss_of_a_callers_own_forward_must_be_a_scalar_with_a_gradient(engine):
    for loss in (torch.ones(()), torch.ones(2, requires_grad=True)):
        with pytest.raises(ValueError, match="a scalar tensor computed from the outputs"):
            engine.backward(loss)


def test_loss_of_one_element_is_a_scalar(engine):
    for shape in ((), (1,), (1, 1)):
        loss_fn = lambda logits, *_, shape=shape: logits.sum().reshape(shape)  # noqa: E731
        assert engine.forward_backward_step(input_dict=BATCH, loss_fn=loss_fn).shape == ()
    assert engine.optim_step().grad_norm > 0


def poison(engine, value: float = math.nan):
    for p in engine.model_parts[0].parameters():
        p.grad = torch.full_like(p, value)


def backward(engine, seed: int = 0):
    batch, labels = random_batch(2, 32, seed)
    return run_backward(engine, batch, labels, num_valid(labels))


def step(engine, seed: int = 0, **arguments):
    backward(engine, seed)
    return engine.optim_step(**arguments)


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


def test_engine_closes_itself_at_the_end_of_its_block_and_takes_no_step_then(tmp_path, monkeypatch):
    with make_engine(tmp_path) as engine:
        closed = []
        monkeypatch.setattr(engine.checkpointer, "close", lambda: closed.append(True))
    assert closed
    message = r"_step was called after close\(\); build a new engine"
    for call in (engine.forward_step, lambda x: run_backward(engine, x, LABELS)):
        with pytest.raises(RuntimeError, match=message):
            call(BATCH)
    with pytest.raises(RuntimeError, match=message):
        engine.optim_step()


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
        step(engine)
        engine.step = 5  # counted by its caller
        engine.save()
    for n in (6, 7):
        with make_engine(tmp_path, *flags) as engine:
            assert engine.load()
            step(engine)
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
            step(engine)
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


@pytest.mark.parametrize(("local_rank", "expected"), [(None, 3), ("1", 1)])
def test_without_a_launcher_the_device_is_the_one_of_the_host(local_rank, expected, monkeypatch):
    used = [3]
    accelerator = SimpleNamespace(
        current_device=lambda: used[-1], device_count=lambda: 4, set_device=used.append
    )
    monkeypatch.setattr(host, "_engines", set())  # nothing is on loan
    monkeypatch.setattr(utils, "get_device_info", lambda: ("cuda", accelerator))
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    assert rank_layout.set_device() == torch.device("cuda", expected)
    assert used[-1] == expected


@pytest.mark.parametrize(
    "device, settings, of_spec, expected",
    [
        ("cpu", {}, {}, False),
        ("cuda", {}, {}, True),
        ("cuda", {"data_parallel_replicate_degree": 2}, {}, False),  # DDP
        ("cuda", {"always_fsdp": False}, {}, False),
        ("cpu", {"always_fsdp": True}, {}, True),
        # A client's own function keeps its autocast.
        ("cuda", {}, {"parallelize_fn": lambda model, *_: model}, False),
    ],
)
def test_fsdp_holds_the_parameters_of_one_accelerator(device, settings, of_spec, expected):
    config = JobConfig(parallelism=Parallelism(**settings))
    spec = dataclasses.replace(get_train_spec("llama3"), **of_spec)
    assert rank_layout.is_fsdp_wanted_always(config, spec, torch.device(device)) is expected


def test_documents_longer_than_seq_len_get_a_longer_rope_table(tmp_path):
    flavor = copy.deepcopy(get_train_spec("llama3").model_args["debugmodel"])
    short = make_engine(tmp_path / "a", "--training.seq_len=16")
    long = make_engine(tmp_path / "b", "--training.seq_len=64")
    batch, labels = random_batch(1, 40)
    packed = {"input": batch["input"][:, :16], "positions": torch.arange(20, 36)[None]}
    for inputs in (batch, packed):
        ours, theirs = short.forward_step(inputs)[0], long.forward_step(inputs)[0]
        assert torch.equal(ours, theirs)
    assert (short.model_args.max_seq_len, long.model_args.max_seq_len) == (16, 64)
    assert get_train_spec("llama3").model_args["debugmodel"] == flavor
    run_backward(short, batch, labels)


def test_own_loop_may_average_but_a_trainer_with_data_counts_over_all_ranks(tmp_path):
    flags = "--training.dataset=python_docs", "--training.gradient_reduction=mean"
    config = make_config(tmp_path, *flags)
    with pytest.raises(ConfigError, match="gradient_reduction = 'mean' .* set it to 'sum'"):
        Trainer(config)
    TrainingEngine(config).close()


def test_trainer_without_dataloader_says_how_to_feed_batches(tmp_path, monkeypatch):
    none = dict.fromkeys(("build_dataloader_fn", "build_tokenizer_fn", "build_validator_fn"))
    spec = dataclasses.replace(get_train_spec("llama3"), **none)
    monkeypatch.setattr(train_spec_module, "get_train_spec", lambda name: spec)
    trainer = Trainer(make_config(tmp_path))
    assert trainer.dataloader is None and trainer.tokenizer is None
    for call in (trainer.train, lambda: trainer.batch_generator(trainer.dataloader)):
        with pytest.raises(ValueError, match=r"feed batches yourself with forward_backward_step"):
            call()


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
