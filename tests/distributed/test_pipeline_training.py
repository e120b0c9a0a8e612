"""Whole training runs under pipeline parallelism against one process."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.training_runs import (
    FOUR_LAYERS,
    make_trainer,
    max_relative_difference,
    validation_losses,
)
from torchtitan.testing.gloo import run_ranks

STEPS = 3
# fp32: the order of summation differs between layouts.
TOLERANCE = 1e-5
PACKED = ["--model.attn_type=varlen", "--model.attn_mask_type=position_block_causal"]
PACKED += [FOUR_LAYERS]  # one for each of four stages
COMMON = [
    *PACKED,
    f"--training.steps={STEPS}",
    "--training.global_batch_size=8",
    "--debug.check_document_isolation_freq=2",
]


def pipeline(schedule, dp_shard=1, dp_replicate=1, local_batch_size=8, pp=2):
    return [
        f"--parallelism.pipeline_parallel_degree={pp}",
        f"--parallelism.pipeline_parallel_schedule={schedule}",
        f"--parallelism.data_parallel_shard_degree={dp_shard}",
        f"--parallelism.data_parallel_replicate_degree={dp_replicate}",
        f"--training.local_batch_size={local_batch_size}",
    ]


def train(dump_folder, overrides):
    """Return the record of a run, with its validation loss, model size and final weights' names."""
    trainer = make_trainer(dump_folder, [*COMMON, *overrides])
    record = {"loss": [], "grad_norm": [], "num_params": trainer.num_params}
    record["hashes"] = weights_of(trainer)

    def note(step, global_avg_loss, global_max_loss, grad_norm, extra_metrics=None):
        record["loss"].append(global_avg_loss)
        record["grad_norm"].append(grad_norm)

    trainer.metrics_processor.log = note
    trainer.train()
    record["logits"] = forward_only(trainer)
    trainer.close()
    return record


def weights_of(trainer):
    """Return the sum of each of this rank's parameters in fp64, by name."""
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().double().sum().item()
        for part in trainer.model_parts
        for name, p in part.named_parameters()
    }


def forward_only(trainer):
    """Return mean logits of three microbatches of three lengths, or None."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for length in (7, 32, 12):
        tokens = torch.randint(0, 2048, (2, length), generator=generator)
        batches.append({"input": tokens, "positions": torch.arange(length).expand(2, -1)})
    means = trainer.forward_step(batches, output_fn=lambda logits, batch: logits.mean().item())
    logits = trainer.forward_step(batches)
    assert (means is None) == (logits is None)
    if logits is None:
        return None
    assert [tuple(entry.shape[:2]) for entry in logits] == [(2, 7), (2, 32), (2, 12)]
    assert means == [entry.mean().item() for entry in logits]
    return means


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("one"))
    (record,) = run_ranks(
        train, 1, folder, ["--training.local_batch_size=8"], init_process_group=False
    )
    return record


LAYOUTS = [
    pytest.param(2, pipeline("1F1B"), id="PP 2"),
    pytest.param(2, pipeline("Interleaved1F1B", local_batch_size=4), id="PP 2, accumulation 2"),
    pytest.param(4, pipeline("1F1B", dp_shard=2, local_batch_size=4), id="PP 2 x FSDP 2"),
    pytest.param(
        4,
        [
            *pipeline("InterleavedZeroBubble", dp_shard=2, local_batch_size=4),
            "--parallelism.pipeline_parallel_layers_per_stage=1",
        ],
        id="zero bubble, PP 2 with many stages x FSDP 2",
    ),
    pytest.param(
        4, pipeline("ZBVZeroBubble", dp_replicate=2, local_batch_size=2), id="ZBV 2 x DDP 2, acc. 2"
    ),
]


@pytest.mark.parametrize("world_size, overrides", LAYOUTS)
def test_pipeline_trains_as_one_process_does(world_size, overrides, one_process, tmp_path):
    records = run_ranks(train, world_size, str(tmp_path), overrides, init_process_group=False)
    weights = {}
    for record in records:
        weights |= record["hashes"]
        assert record["num_params"] == one_process["num_params"]
        # Every rank knows the loss and the norm of the whole.
        assert max_relative_difference(record["loss"], one_process["loss"]) < TOLERANCE
        assert max_relative_difference(record["grad_norm"], one_process["grad_norm"]) < TOLERANCE
    assert weights == one_process["hashes"]
    with_logits = [record["logits"] for record in records if record["logits"] is not None]
    assert len(with_logits) == world_size // 2
    for means in with_logits:
        assert means == pytest.approx(one_process["logits"], rel=1e-2, abs=1e-6)


# ---- checkpoints and validation ----


def resume_and_export(dump_folder, overrides):
    """Train to step 4, keeping every step, the last one in Hugging Face files."""
    trainer = make_trainer(
        dump_folder,
        [
            *COMMON,
            "--training.steps=4",
            "--checkpoint.enable",
            "--checkpoint.interval=1",
            "--checkpoint.last_save_in_hf",
            *overrides,
        ],
    )
    trainer.train()
    trainer.close()


def hugging_face_weights(folder):
    weights = {}
    for file in (folder / "checkpoint" / "step-4").glob("*.safetensors"):
        weights |= load_file(file)
    return weights


def test_checkpoints_move_between_layouts_and_exports_are_whole(tmp_path):
    def run(name, world_size, overrides, start=None):
        folder = tmp_path / name
        if start is not None:
            shutil.copytree(start, folder / "checkpoint" / start.name)
        run_ranks(resume_and_export, world_size, str(folder), overrides, init_process_group=False)
        return folder

    alone = ["--training.local_batch_size=8"]
    one = run("one", 1, alone)
    piped = run("piped", 2, pipeline("Interleaved1F1B"), start=one / "checkpoint" / "step-2")
    back = run("back", 1, alone, start=piped / "checkpoint" / "step-3")
    expected = hugging_face_weights(one)
    assert "lm_head.weight" in expected and "model.layers.3.mlp.up_proj.weight" in expected
    for folder in (piped, back):
        weights = hugging_face_weights(folder)
        assert weights.keys() == expected.keys()
        for name, tensor in expected.items():
            # AdamW makes much of gradients that are nothing but rounding.
            torch.testing.assert_close(weights[name], tensor, rtol=1e-3, atol=1e-4, msg=name)


def test_validation_reports_the_mean_on_every_rank(tmp_path):
    def run(name, world_size, overrides):
        return run_ranks(
            validation_losses,
            world_size,
            str(tmp_path / name),
            overrides,
            init_process_group=False,
        )

    (expected,) = run("one", 1, ["--training.local_batch_size=4"])
    # 3 rows in microbatches of 2: one of 2 and one of 1.
    overrides = pipeline("1F1B", local_batch_size=4)
    overrides.append("--parallelism.pipeline_parallel_microbatch_size=2")
    for losses in run("piped", 2, overrides):
        assert len(losses) == 2 and losses == pytest.approx(expected, rel=TOLERANCE)


# ---- the engine, fed by its owner ----


def feed(dump_folder, overrides):
    """Return (losses, gradient norms) for lists of unlike microbatches and a custom loss."""
    engine = make_trainer(dump_folder, [*PACKED, *overrides, "--training.local_batch_size=4"])
    generator = torch.Generator().manual_seed(0)
    losses, norms = [], []

    def weighted(logits, labels, batch):
        logprobs = logits.log_softmax(-1).gather(-1, labels[..., None]).squeeze(-1)
        return -(logprobs * batch["weights"]).sum()

    for lengths in ((5, 32, 16), (9,), (8, 8, 30, 3, 17)):
        batches, labels = [], []
        for length in lengths:
            tokens = torch.randint(0, 2048, (1, length + 1), generator=generator)
            batches.append({"input": tokens[:, :-1], "positions": torch.arange(length)[None]})
            labels.append(tokens[:, 1:])
        total = sum(lengths)
        loss = engine.forward_backward_step(
            input_dict=batches, labels=labels, global_valid_tokens=total
        )
        losses.append(loss.item())
        norms.append(engine.optim_step().grad_norm.item())
    # `weights` are for the loss alone: not for the model.
    engine.post_dataloading_process = drop_weights(engine.post_dataloading_process)
    batch = {**batches[2], "weights": torch.linspace(0, 1, 30)[None]}
    loss = engine.forward_backward_step(
        input_dict=[batch], labels=labels[2:3], global_valid_tokens=30, loss_fn=weighted
    )
    losses.append(loss.item())
    norms.append(engine.optim_step().grad_norm.item())
    engine.close()
    return losses, norms


def drop_weights(process):
    def without(batch, labels):
        return process({key: batch[key] for key in batch if key != "weights"}, labels)

    return without


def leak(dump_folder, overrides):
    """Return the isolation probe's verdict on a model whose layer 3 lets tokens see the whole row."""
    trainer = make_trainer(
        dump_folder, [*PACKED, *overrides, "--debug.check_document_isolation_freq=1"]
    )
    for part in trainer.model_parts:
        if "3" in part.layers:
            part.layers["3"].register_forward_hook(lambda m, args, x: x + x.mean(1, keepdim=True))
    with pytest.raises(RuntimeError, match="documents are not isolated at step 1") as error:
        trainer.train()
    trainer.close()
    return str(error.value)


def feed_and_leak(dump_folder, overrides):
    return feed(dump_folder, overrides), leak(dump_folder, overrides)


def test_lists_of_any_lengths_and_own_losses_and_the_layer_that_leaks(tmp_path):
    ((expected, _),) = run_ranks(
        feed_and_leak, 1, str(tmp_path / "one"), [], init_process_group=False
    )
    results = run_ranks(
        feed_and_leak, 2, str(tmp_path / "two"), pipeline("1F1B"), init_process_group=False
    )
    for fed, _ in results:
        for ours, theirs in zip(fed, expected, strict=True):
            assert max_relative_difference(ours, theirs) < TOLERANCE
    # The rank with the logits finds the leak, and names a layer of whichever rank has it.
    assert "layers.3 is the first layer" in results[1][1]
    assert "another rank found a leak" in results[0][1]
