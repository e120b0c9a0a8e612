"""Microbatches of any shapes in every schedule, compared with one process."""

import functools
from contextlib import nullcontext
from unittest.mock import patch

import pytest
import torch
from torch.nn import functional as F

from tests.distributed import parallel_dims
from torchtitan.config import JobConfig
from torchtitan.distributed import pipeline_schedule
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.distributed.seeded_init import seeded_init
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.parallelize import parallelize_decoder
from torchtitan.testing.gloo import run_ranks

VOCAB = 64
LENGTHS = (16, 9, 24, 5, 20, 17, 11, 32)
SCHEDULES = (
    "1F1B GPipe Interleaved1F1B LoopedBFS InterleavedZeroBubble ZBVZeroBubble DualPipeV".split()
)


def model_args(attn_type="varlen"):
    sizes = dict(dim=16, n_layers=6, n_heads=2, vocab_size=VOCAB, multiple_of=8, max_seq_len=128)
    mask_type = "causal" if attn_type == "sdpa" else "position_block_causal"
    return TransformerModelArgs(attn_type=attn_type, attn_mask_type=mask_type, **sizes)


def job_config(schedule, pp, local_batch_size=8, csv_path=""):
    config = JobConfig()
    config.activation_checkpoint.mode = "none"
    config.training.local_batch_size = local_batch_size
    config.parallelism.pipeline_parallel_degree = pp
    config.parallelism.pipeline_parallel_schedule = schedule
    config.parallelism.pipeline_parallel_schedule_csv = csv_path
    return config


@functools.cache
def weights():
    model = meta_model().to_empty(device="cpu")
    with torch.no_grad(), seeded_init(model, 1):
        model.init_weights()
    return model.state_dict()


def fill(part):
    part.to_empty(device="cpu")
    part.freqs_cis = part.build_rope_table(part.model_args.max_seq_len)
    part.load_state_dict(weights(), strict=False)
    return part


def sum_loss(logits, labels):
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def microbatches(model, lengths, seed=0):
    """(arg_mbs, kwarg_mbs, target_mbs): rows of two documents, 1 row or 2."""
    generator = torch.Generator().manual_seed(seed)
    arg_mbs, kwarg_mbs, target_mbs = [], [], []
    for i, length in enumerate(lengths):
        rows = 1 + i % 2
        tokens = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
        first = length // 3
        positions = torch.cat([torch.arange(first), torch.arange(length - first)])
        positions = positions.expand(rows, length)
        masks = model.get_attention_masks(tokens[:, :-1], None, {"positions": positions})
        arg_mbs.append((tokens[:, :-1],))
        kwarg_mbs.append({"positions": positions, "attention_masks": masks})
        target_mbs.append(tokens[:, 1:])
    return arg_mbs, kwarg_mbs, target_mbs


def meta_model(attn_type="varlen"):
    with torch.device("meta"):
        return Transformer(model_args(attn_type))


@functools.cache
def alone(lengths, seed=0):
    """Return (losses, outputs, gradients) of one process, microbatch by microbatch."""
    model = fill(meta_model())
    losses, outputs = [], []
    for (tokens,), kwargs, labels in zip(*microbatches(model, lengths, seed), strict=True):
        logits = model(tokens, **kwargs)
        loss = sum_loss(logits, labels)
        loss.backward()
        losses.append(loss.detach())
        outputs.append(logits.detach())
    return losses, outputs, {name: p.grad for name, p in model.named_parameters()}


class Pipeline:
    """This rank's part of the model, and a schedule."""

    def __init__(self, config, dp_replicate=1, attn_type="varlen"):
        pp = config.parallelism.pipeline_parallel_degree
        self.dims = parallel_dims(dp_replicate=dp_replicate, pp=pp)
        given = meta_model(attn_type), self.dims, config, torch.device("cpu"), model_args(attn_type)
        self.schedule, self.parts, self.first, self.last = pipeline_llm(
            *given, parallelize_decoder, sum_loss
        )
        for part in self.parts:
            fill(part)

    def inputs(self, lengths, seed=0):
        """Return arguments on the rank of the first stage, and targets on the rank of the last."""
        arg_mbs, kwarg_mbs, target_mbs = microbatches(self.parts[0], lengths, seed)
        return {
            "arg_mbs": arg_mbs if self.first else None,
            "kwarg_mbs": kwarg_mbs,
            "target_mbs": target_mbs if self.last else None,
        }

    def take_gradients(self):
        gradients = {}
        for part in self.parts:
            for name, parameter in part.named_parameters():
                gradients[name] = parameter.grad
                parameter.grad = None
        return gradients


def check_training(pipeline, lengths, bitwise):
    expected_losses, _, expected = alone(lengths)
    losses = []
    inputs = pipeline.inputs(lengths)
    assert pipeline.schedule.step(**inputs, losses=losses, return_outputs=False) is None
    assert len(losses) == (len(lengths) if pipeline.last else 0)
    if pipeline.last:
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=0)
    # Sums in fp32; LoopedBFS adds up microbatches in another order.
    tolerance = {"rtol": 0, "atol": 0} if bitwise else {"rtol": 1e-5, "atol": 1e-5}
    for name, gradient in pipeline.take_gradients().items():
        torch.testing.assert_close(gradient, expected[name], **tolerance, msg=name)


def check_forward(pipeline, lengths):
    expected_losses, expected, _ = alone(lengths)
    losses, inputs = [], pipeline.inputs(lengths)
    outputs = pipeline.schedule.eval(**inputs, losses=losses)
    if pipeline.last:
        torch.testing.assert_close(losses, expected_losses, rtol=0, atol=0)
        torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
    else:
        assert outputs is None and losses == []
    assert all(gradient is None for gradient in pipeline.take_gradients().values())
    outputs = pipeline.schedule.eval(**inputs | {"target_mbs": None})
    assert not pipeline.last or all(map(torch.equal, outputs, expected))


def run_schedules(schedules, pp, csv_path=""):
    for schedule in schedules:
        pipeline = Pipeline(job_config(schedule, pp, csv_path=csv_path))
        bitwise = schedule not in ("LoopedBFS", "PipelineScheduleMulti")
        check_forward(pipeline, LENGTHS)
        check_training(pipeline, LENGTHS, bitwise)
        # Other numbers of microbatches, some of which torch's schedule refuses.
        check_training(pipeline, LENGTHS[:5], bitwise)
        check_forward(pipeline, LENGTHS[:1])
        check_training(pipeline, LENGTHS[:1], bitwise)
        check_training(pipeline, LENGTHS, bitwise)


def test_every_schedule_gives_losses_gradients_and_outputs_of_one_process():
    run_ranks(run_schedules, 2, SCHEDULES, 2)


def test_schedules_on_four_ranks():
    run_ranks(run_schedules, 4, ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"], 4)


def run_whole_batches():
    """Call `step` like torch's: a whole batch goes in, and whole outputs come out."""
    tokens = torch.randint(0, VOCAB, (4, 8), generator=torch.Generator().manual_seed(0))
    pipeline = Pipeline(job_config("1F1B", 2, local_batch_size=4), attn_type="sdpa")
    model = fill(meta_model("sdpa"))
    logits = model(tokens)
    losses = []
    first, last = pipeline.first, pipeline.last
    inputs = (tokens,) if first else ()
    outputs = pipeline.schedule.step(*inputs, target=tokens if last else None, losses=losses)
    again = pipeline.schedule.eval(*inputs)
    if last:
        torch.testing.assert_close(outputs, logits)
        torch.testing.assert_close(again, logits)
        torch.testing.assert_close(sum(losses), sum_loss(logits, tokens))
        assert len(losses) == 4
    else:
        assert outputs is None and again is None


class FailedOnPurpose(Exception):
    pass


def run_replicas():
    """Two replicas of two stages, two steps of gradient accumulation on unlike lengths."""
    pipeline = Pipeline(job_config("1F1B", 2), dp_replicate=2)
    replica = pipeline.dims.get_mesh("dp_replicate").get_local_rank()
    mine = [LENGTHS[:4], LENGTHS[4:]][replica]
    for seed in range(2):
        pipeline.schedule.step(**pipeline.inputs(mine, seed), return_outputs=False)
        # Neither a step that fails nor schedules of other lengths touch what is there.
        with patch.object(pipeline_schedule._Call, "run", side_effect=FailedOnPurpose):
            with pytest.raises(FailedOnPurpose):
                pipeline.schedule.step(**pipeline.inputs(mine, 2), return_outputs=False)
        for n in range(1, 40):
            pipeline.schedule._actions(n, True)
        kept = pipeline.schedule._actions.cache_info().currsize
        assert kept == pipeline_schedule._MAX_ORDERS
    expected = {}
    for lengths in (LENGTHS[:4], LENGTHS[4:]):
        for seed in range(2):
            for name, gradient in alone(lengths, seed)[2].items():
                expected[name] = expected.get(name, 0) + gradient
    for name, gradient in pipeline.take_gradients().items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)


class FailsOn:
    """A function that fails at its n-th call."""

    def __init__(self, n, function):
        self.n, self.function = n, function

    def __call__(self, *args, **kwargs):
        self.n -= 1
        if self.n == 0:
            raise FailedOnPurpose
        return self.function(*args, **kwargs)


def run_after_failures(name):
    """Make calls fail after their last send, so that the other rank's calls end."""
    pipeline = Pipeline(job_config(name, 2))
    lengths = LENGTHS[:4]
    with pytest.raises(FailedOnPurpose) if pipeline.last else nullcontext():
        loss_fn = FailsOn(len(lengths), sum_loss)
        pipeline.schedule.eval(**pipeline.inputs(lengths), losses=[], loss_fn=loss_fn)
    check_forward(pipeline, lengths)

    stage = pipeline.schedule.stages[0]
    num_backwards = len(lengths) if pipeline.first else -1
    backward = FailsOn(num_backwards, stage.backward)
    with patch.object(stage, "backward", backward):
        with pytest.raises(FailedOnPurpose) if pipeline.first else nullcontext():
            pipeline.schedule.step(**pipeline.inputs(lengths), return_outputs=False)
    pipeline.take_gradients()
    check_training(pipeline, lengths, bitwise=True)


@pytest.mark.parametrize("name", ["1F1B", "Interleaved1F1B"])
def test_call_after_one_that_failed_gives_what_one_process_gives(name):
    run_ranks(run_after_failures, 2, name)


def run_whole_batches_and_csv(path):
    run_whole_batches()
    run_schedules(["PipelineScheduleMulti"], 2, path)
    pipeline = Pipeline(job_config("PipelineScheduleMulti", 2, csv_path=path))
    with pytest.raises(ValueError, match="orders 8 microbatches, got 9; give fewer"):
        pipeline.schedule.eval(**pipeline.inputs([8] * 9))
    with pytest.raises(ValueError, match=r"assigns stages .* to rank \d, which owns"):
        Pipeline(job_config("ZBVZeroBubble", 2, csv_path=path))


def test_whole_batches_and_orders_from_a_file(tmp_path):
    # Forwards of 8 microbatches on stages 0 and 2 (rank 0), 1 and 3 (rank 1), then backwards.
    rows = []
    for stages in ((0, 2), (1, 3)):
        actions = [f"{stage}F{i}" for stage in stages for i in range(8)]
        actions += [
            f"{stage}{kind}{i}" for stage in stages[::-1] for i in range(8) for kind in "IW"
        ]
        rows.append(",".join(actions))
    path = tmp_path / "order.csv"
    path.write_text("\n".join(rows))
    run_ranks(run_whole_batches_and_csv, 2, str(path))


def test_gradients_are_summed_over_replicas_once():
    run_ranks(run_replicas, 4)
