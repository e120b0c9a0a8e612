"""Samples that share prefixes give the loss, metrics, gradients and scores that they give in rows of their own."""

import random

import pytest
import torch

from tests.unit.rl.test_critic import critic_of
from tests.unit.rl.toy import VOCAB, gradients, toy_config
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.losses import GRPOLoss, GSPOLoss
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import TrainingSample

PACKED = ["--model.attn_mask_type=position_block_causal", "--training.seq_len=128"]
# fp32: sums in another order.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
LOSSES = {
    "clipped": GRPOLoss(kl_coef=0.1, entropy_coef=0.02),
    "per sequence": GSPOLoss(ratio_clip_low=0.3, ratio_clip_high=0.4),
    "corrected": GRPOLoss(correction="sequence", max_sequence_mismatch=0.7),
}


def groups_and_turns(seed=0):
    """Groups of one prompt, then dialogues whose turns are samples: their prompts have the turns before."""
    rng = random.Random(seed)

    def tokens(n):
        return [rng.randrange(VOCAB) for _ in range(n)]

    sequences = []
    for group in range(3):
        prompt = tokens(rng.randint(1, 12))
        sequences += [(group, prompt, tokens(rng.randint(1, 7))) for _ in range(4)]
    for group in (3, 4):
        history = tokens(9)
        for _ in range(3):
            turns = [(group, history, tokens(rng.randint(2, 4))) for _ in range(2)]
            sequences += turns
            history = turns[0][1] + turns[0][2] + tokens(3)  # the environment's reply
    rng.shuffle(sequences)
    samples = []
    for group, prompt, new in sequences:
        logprobs, ref_logprobs = ([rng.uniform(-4, -3) for _ in new] for _ in range(2))
        options = {"ref_logprobs": ref_logprobs, "group_id": group}
        advantage = rng.uniform(-1, 1)
        samples.append(TrainingSample.from_sequence(prompt, new, logprobs, advantage, **options))
    return samples


def make_batcher(shares, **settings):
    settings = {"seq_len": 100, "rows": 4, "agg_mode": "seq-mean-token-mean"} | settings
    return Batcher(packing=True, share_prefixes=shares, **settings)


@pytest.fixture(scope="module", params=["flex", "varlen"])
def trainer(request, tmp_path_factory):
    flags = [*PACKED, f"--model.attn_type={request.param}"]
    trainer = PolicyTrainer(toy_config(tmp_path_factory.mktemp("run"), *flags))
    yield trainer
    trainer.close()


@pytest.mark.parametrize("loss", LOSSES)
def test_loss_metrics_gradients_and_logprobs_are_those_of_separate_samples(trainer, loss):
    samples = groups_and_turns()
    results = []
    for shares in (False, True):
        batch = make_batcher(shares).batch(samples)
        output = trainer.forward_backward(batch, LOSSES[loss], return_logprobs=True)
        results.append((output, gradients(trainer), trainer.forward(batch), batch))
        trainer.zero_grad()
    (packed, packed_grads, packed_scores, plain), (ours, grads, scores, shared) = results
    assert ours.loss == pytest.approx(packed.loss, rel=1e-5)
    assert ours.metrics == pytest.approx(packed.metrics, rel=1e-4, abs=1e-5)
    torch.testing.assert_close(grads, packed_grads, **CLOSE)
    for found, expected in ((ours.logprobs, packed.logprobs), (scores, packed_scores)):
        torch.testing.assert_close(found, expected, **CLOSE)
    assert shared.num_global_valid_tokens == plain.num_global_valid_tokens
    assert shared.slots_per_token < 0.7 * plain.slots_per_token
    weights = [cell.inputs["loss_weights"] for cell in shared.of_all_ranks]
    assert sum(float(x.sum()) for x in weights) == pytest.approx(1.0), "no slot counts twice"


def test_rescored_batches_of_two_ranks_and_models_keep_each_samples_own_values():
    samples = groups_and_turns(1)
    models = [i % 2 for i in range(len(samples))]
    batch = make_batcher(True, dp_size=2, rows=1, seq_len=60).batch(samples, models)
    for cell in batch.of_all_ranks:
        tokens = cell.per_sample(cell.inputs["input"])
        masks = cell.per_sample(cell.inputs["loss_mask"], only_own=True)
        advantages = cell.per_sample(cell.inputs["advantages"], only_own=True)
        for slot in cell.slots:
            sample = samples[slot.sample]
            assert torch.equal(tokens[slot.sample], sample.token_ids)
            assert torch.equal(masks[slot.sample], sample.loss_mask)
            assert torch.equal(advantages[slot.sample], sample.advantages * sample.loss_mask)
            assert cell.inputs["models"][slot.row] == models[slot.sample]
    expected = sorted(s.advantages[s.loss_mask != 0].mean().item() for s in samples)
    assert sorted(batch.sample_advantages()) == pytest.approx(expected)


def test_samples_whose_experts_differ_share_no_slot_from_there_on():
    samples = [
        TrainingSample.from_sequence(
            [1, 2, 3, 4], [i], [-1.0], 1.0, routed_experts=torch.zeros(4, 2, 1, dtype=torch.int16)
        )
        for i in (5, 6, 7)
    ]
    samples[2].routed_experts[2] = 3
    ((cell,),) = make_batcher(True).batch(samples).microbatches
    # 3 shared slots and a copy of the last prompt token for each; the third has its third slot, too.
    assert (cell.inputs["positions"] >= 0).sum() == 3 + 2 + 2
    for slot in cell.slots:
        experts = cell.per_sample(cell.inputs["routed_experts"])[slot.sample]
        assert torch.equal(experts, samples[slot.sample].routed_experts)


def test_labels_that_are_scored_outside_the_loss_keep_their_logprobs(trainer):
    samples = groups_and_turns(2)
    logprobs = [
        trainer.forward(make_batcher(shares, scores_masked=True).batch(samples))
        for shares in (False, True)
    ]
    torch.testing.assert_close(*logprobs, **CLOSE)
    assert all((own != 0).all() for own in logprobs[1])


def test_batch_in_which_nothing_is_shared_is_that_of_packing():
    samples = [
        TrainingSample.from_sequence([i], [1] * (1 + i % 3), [-1.0] * (1 + i % 3), 1.0)
        for i in random.Random(0).sample(range(VOCAB), 12)
    ]
    batches = [make_batcher(shares, seq_len=7).batch(samples) for shares in (False, True)]
    for ours, theirs in zip(*(batch.of_all_ranks for batch in batches), strict=True):
        torch.testing.assert_close(ours.inputs, theirs.inputs, rtol=0, atol=0)


def test_critic_and_its_gradients_are_those_of_separate_samples(tmp_path):
    flags = [*PACKED, "--model.attn_type=flex", "--rl.advantage.name=gae", "--rl.batch.packing"]
    results = []
    for share in ([], ["--rl.batch.share_prefixes"]):
        with critic_of(toy_config(tmp_path, *flags, *share)) as critic:
            critic.begin()
            samples = groups_and_turns()
            rewards = [s.advantages[-1].item() for s in samples]
            found, metrics = critic.with_advantages(samples, rewards)
            metrics |= {"loss": critic.forward_backward(critic.batcher.batch(found)).loss}
            values = [torch.stack((s.advantages, s.old_values, s.returns)) for s in found]
            results.append((values, gradients(critic), metrics))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


LOOP = [*PACKED, "--model.attn_type=flex", "--rl.batch.packing", "--training.steps=4"]
LOOP += ["--rl.loss.kl_coef=0.1", "--rl.minibatches=2", "--rl.loss.correction=token"]


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_runs_that_share_prefixes_draw_the_same_tokens_and_take_the_same_steps(
    seed, tmp_path, start
):
    runs = []
    for share in ([], ["--rl.batch.share_prefixes"]):
        flags = [f"--debug.seed={seed}", f"--rl.seed={seed}"]
        controller = start(*LOOP, *flags, *share, folder=tmp_path / str(len(share)))
        runs.append([controller.train_step() for _ in range(2)])
    for packed, shared in zip(*runs, strict=True):
        assert shared["rl/reward"] == packed["rl/reward"]
        assert shared["rl/slots_per_token"] < 0.8 * packed["rl/slots_per_token"]
        for name in packed.keys() - {"rl/slots_per_token"}:
            if not name.startswith("time/"):
                assert shared[name] == pytest.approx(packed[name], rel=1e-3, abs=2e-5), name
