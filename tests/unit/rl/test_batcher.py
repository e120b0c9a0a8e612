import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.rl.samples import LONGEST, TinyPolicy, loss_of_batch, random_samples, tokens_of
from torchtitan.loss.aggregation import LOSS_AGGREGATIONS, aggregation_weights
from torchtitan.loss.cross_entropy import IGNORE_INDEX
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.losses import GRPOLoss, GSPOLoss
from torchtitan.rl.types import TrainingSample

NORM = 5.0
LOSS = GRPOLoss(kl_coef=0.1, entropy_coef=0.02)
# Loss weights are fp32 and the same bits in every split; sums are in float64 here.
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


def make_batcher(mode="token-mean", **settings):
    return Batcher(**{"seq_len": 2 * LONGEST, "agg_mode": mode, "norm": NORM} | settings)


def all_at_once(samples, mode, loss=LOSS):
    policy = TinyPolicy()
    total, metrics = loss_of_batch(policy, loss, make_batcher(mode, rows=1000).batch(samples))
    return total, policy.gradient(total), metrics


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
def test_tokens_have_the_weights_of_the_aggregation(mode):
    samples = random_samples(7)
    masks, groups = [s.loss_mask for s in samples], [s.group_id for s in samples]
    expected = aggregation_weights(masks, mode, norm=NORM, prompt_ids=groups)
    for (cell,) in make_batcher(mode, rows=3).batch(samples).microbatches:
        for index, weights in cell.per_sample(cell.inputs["loss_weights"]).items():
            assert weights.tolist() == expected[index].tolist()


@pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)
@pytest.mark.parametrize(
    "loss",
    [
        LOSS,
        GSPOLoss(ratio_clip_low=0.3, ratio_clip_high=0.4),
        dataclasses.replace(LOSS, correction="token", max_token_mismatch=1.2),
        dataclasses.replace(LOSS, correction="sequence", max_sequence_mismatch=0.7),
    ],
    ids=["clipped", "per sequence", "corrected per token", "corrected per sequence"],
)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_loss_gradient_and_metrics_are_the_same_for_any_split(mode, loss, data):
    samples = random_samples(data.draw(st.integers(1, 9), "samples"), seed=1)
    total, gradient, metrics = all_at_once(samples, mode, loss)
    batcher = make_batcher(
        mode,
        dp_size=data.draw(st.integers(1, 4), "ranks"),
        rows=data.draw(st.integers(1, 5), "rows"),
        packing=data.draw(st.booleans(), "packing"),
        bucketing=data.draw(st.booleans(), "bucketing"),
        pad_multiple=data.draw(st.sampled_from([1, 8]), "pad_multiple"),
    )
    batch = batcher.batch(data.draw(st.permutations(samples), "order"))
    policy = TinyPolicy()
    split_total, split_metrics = loss_of_batch(policy, loss, batch)
    torch.testing.assert_close(split_total, total, **CLOSE)
    torch.testing.assert_close(policy.gradient(split_total), gradient, **CLOSE)
    assert split_metrics == pytest.approx(metrics, rel=1e-12, abs=1e-13)


def test_token_without_finite_logprob_is_left_out_of_loss_and_denominator():
    samples = random_samples(6)
    token = int(samples[1].loss_mask.nonzero()[0])
    without = samples[1].loss_mask.clone()
    without[token] = 0
    expected = all_at_once(
        [dataclasses.replace(s, loss_mask=without) if s is samples[1] else s for s in samples],
        "token-mean",
    )
    for name, value in (
        ("logprobs", -torch.inf),
        ("logprobs", torch.nan),
        ("ref_logprobs", torch.nan),
        ("old_logprobs", torch.nan),
    ):
        values = getattr(samples[1], name).clone()
        values[token] = value
        broken = list(samples)
        broken[1] = dataclasses.replace(samples[1], **{name: values})
        batch = make_batcher().batch(broken)
        assert batch.num_global_valid_tokens == tokens_of(samples) - 1
        _, gradient, metrics = all_at_once(broken, "token-mean")
        torch.testing.assert_close(gradient, expected[1], **CLOSE)
        assert metrics == pytest.approx(expected[2])


# ---- rows and ranks ----


@pytest.mark.parametrize("kind", [{}, {"packing": True}, {"bucketing": True}], ids=str)
@pytest.mark.parametrize("n_samples", [0, 1, 2, 5, 16])
def test_all_ranks_get_equally_many_microbatches_of_one_shape(kind, n_samples):
    """A row has samples of one model, and rows of the same model are adjacent."""
    models = [i * 4 // n_samples for i in range(n_samples)]
    batch = make_batcher(dp_size=3, rows=2, **kind).batch(random_samples(n_samples), models)
    assert all(len(of_ranks) == 3 for of_ranks in batch.microbatches)
    shapes = [
        {tuple(cell.inputs["input"].shape) for cell in of_ranks} for of_ranks in batch.microbatches
    ]
    assert all(len(of_ranks) == 1 for of_ranks in shapes)
    (widths, n_rows) = zip(*[(width, n) for ((n, width),) in shapes], strict=True)
    assert max(n_rows) <= 2 and list(widths) == sorted(widths, reverse=True)
    assert "bucketing" in kind or len(set(widths)) == 1
    cells = [cell for of_ranks in batch.microbatches for cell in of_ranks]
    assert sorted(slot.sample for cell in cells for slot in cell.slots) == list(range(n_samples))
    assert [cell.slots for cell in batch.of_rank(1)] == [row[1].slots for row in batch.microbatches]
    for cell in cells:
        own = cell.inputs.get("models", [0] * len(cell.inputs["labels"]))  # missing for one model
        assert own == sorted(own) and len(own) == len(cell.inputs["labels"])
        assert all(own[slot.row] == models[slot.sample] for slot in cell.slots)


def test_samples_of_advantage_zero_are_skipped_with_the_same_gradient():
    samples = random_samples(9)
    for i in (2, 6, 7, 8):  # of two groups; one of them is skipped as a whole
        samples[i].advantages.zero_()
    loss = dataclasses.replace(LOSS, kl_coef=0.0, entropy_coef=0.0)
    for mode in LOSS_AGGREGATIONS:
        total, gradient, _ = all_at_once(samples, mode, loss)
        batch, policy = (
            make_batcher(mode, rows=2, skip_zero_advantage=True).batch(samples),
            TinyPolicy(),
        )
        # Sample 3 has no token in the loss.
        assert (batch.num_skipped, batch.num_samples) == (5, 9)
        assert batch.num_global_valid_tokens == tokens_of(samples)
        trained = [samples[i] for i in (0, 1, 4, 5)]
        assert batch.num_measured_tokens == tokens_of(trained)
        found, metrics = loss_of_batch(policy, loss, batch)
        torch.testing.assert_close(found, total, **CLOSE)
        torch.testing.assert_close(policy.gradient(found), gradient, **CLOSE)
        _, expected = loss_of_batch(policy, loss, make_batcher(mode).batch(trained))
        assert metrics["ratio_mean"] == pytest.approx(expected["ratio_mean"])


def test_step_in_which_all_are_skipped_has_rows_of_padding_and_gradient_zero():
    samples = random_samples(4)
    for sample in samples:
        sample.advantages.zero_()
    policy, batch = TinyPolicy(), make_batcher(skip_zero_advantage=True, dp_size=2).batch(samples)
    assert batch.num_skipped == 4
    for cell in batch.of_all_ranks:
        assert (cell.inputs["labels"] == IGNORE_INDEX).all()
    total, _ = loss_of_batch(policy, GRPOLoss(), batch)
    assert total.item() == 0 and not policy.gradient(total).any()


def test_bucketed_rows_share_a_microbatch_if_each_fills_four_fifths_of_the_longest():
    cells = make_batcher(bucketing=True, pad_multiple=2).batch(sequences_of(6, 9, 8)).of_rank(0)
    assert [tuple(cell.inputs["input"].shape) for cell in cells] == [(2, 10), (1, 6)]


def test_oversize_samples_are_left_out_counted_and_reported(caplog):
    samples = sequences_of(5, 30, 6)
    with caplog.at_level("WARNING"):
        batch = make_batcher().batch(samples)
    assert "1 of 3 samples do not fit rl.batch.seq_len = 24" in caplog.text
    assert (batch.oversize, batch.num_samples) == ((1,), 3)
    assert batch.num_global_valid_tokens == 11


def test_samples_keep_weights_of_their_own():
    weights = torch.tensor([0.0, 3.0])
    samples = [dataclasses.replace(s, weights=weights) for s in sequences_of(2, 2)]
    ((cell,),) = make_batcher("token-mean").batch(samples).microbatches
    assert cell.inputs["loss_weights"].tolist() == [[0.0, 3.0], [0.0, 3.0]]
    samples[1].loss_mask[1] = 0  # whatever weight such a token has
    ((cell,),) = make_batcher("token-mean").batch(samples).microbatches
    assert cell.inputs["loss_weights"].tolist() == [[0.0, 3.0], [0.0, 0.0]]


def test_samples_of_which_only_some_have_weights_or_reference_are_refused():
    for name in ("weights", "ref_logprobs", "old_logprobs"):
        first, second = sequences_of(2, 2)
        samples = [dataclasses.replace(first, **{name: torch.ones(2)}), second]
        with pytest.raises(ValueError, match=f"all samples of a batch have {name} or none"):
            make_batcher().batch(samples)


def test_batcher_of_a_config_follows_the_training_section_where_rl_says_nothing():
    config = JobConfig()
    config.training.seq_len, config.training.local_batch_size = 64, 3
    config.rl.loss.agg_mode, config.rl.loss.count_empty = "prompt-mean", True
    expected = Batcher(dp_size=2, seq_len=64, rows=3, agg_mode="prompt-mean", count_empty=True)
    assert Batcher.from_config(config, 2) == expected
    config.rl.batch.seq_len, config.rl.batch.local_batch_size = 32, 5
    assert (Batcher.from_config(config, 2).seq_len, Batcher.from_config(config, 2).rows) == (32, 5)


def sequences_of(*lengths):
    """Samples of these lengths, with all slots in the loss."""
    return [
        TrainingSample.from_sequence([1], [2] * length, [-1.0] * length, 1.0) for length in lengths
    ]


def test_packing_fills_rows_to_their_last_slot_and_not_beyond():
    samples = sequences_of(5, 3, 8, 6, 2, 9)
    batch = make_batcher(packing=True, rows=4, seq_len=8).batch(samples)
    assert batch.oversize == (5,)
    ((cell,),) = batch.microbatches
    assert cell.inputs["input"].shape == (3, 8) and (cell.inputs["sequence_ids"] >= 0).all()
    rows = [[slot.sample for slot in cell.slots if slot.row == row] for row in range(3)]
    assert rows == [[2], [3, 4], [0, 1]]  # the longest first, each into the first row with room
