"""Splitting, temperature and scoring of batches, and the batches that are refused."""

import re
from functools import partial

import pytest
import torch
from torch.nn import functional as F
from verl.trainer.ppo.core_algos import agg_loss
from verl.utils import tensordict_utils as tu
from verl.workers.config import EngineRouterReplayConfig
from verl.workers.utils.losses import ppo_loss

from tests.verl import cases
from torchtitan.integrations.verl.samples import pack, unpack
from torchtitan.loss.aggregation import aggregation_weights


@pytest.fixture(scope="module")
def worker(folder):
    with pytest.MonkeyPatch.context() as patch:
        cases.pretend_torchrun(patch)
        worker = cases.make_worker(folder)
        yield worker
        worker.engine.engine.close()


@pytest.fixture
def fresh(worker):
    """The worker with the weights of its folder, and no optimizer state."""
    worker.reset()
    return worker


SPLITS = {
    "whole": dict(micro_batch_size_per_gpu=8),
    "twos": dict(micro_batch_size_per_gpu=2),
    "singles": dict(micro_batch_size_per_gpu=1),
    "dynamic": dict(use_dynamic_bsz=True, max_token_len_per_gpu=40),
}


def test_gradients_are_the_same_for_any_split(fresh):
    records = {}
    for name, split in SPLITS.items():
        fresh.reset()
        records[name] = cases.train(fresh, "ppo", **split)
    whole = records.pop("whole")
    for record in records.values():
        torch.testing.assert_close(record.losses, whole.losses, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(record.norms, whole.norms, rtol=1e-5, atol=0)
        for name, samples in whole.outputs.items():  # in the order of the batch
            torch.testing.assert_close(record.outputs[name], samples, rtol=0, atol=5e-6)


@pytest.mark.parametrize("split", SPLITS)
def test_positions_of_text_may_come_in_the_four_rows_of_a_multimodal_model(fresh, split):
    def batch(n_rows):
        data = cases.batch_of("ppo", 0, **SPLITS[split])
        if n_rows > 1:
            rows = (x.expand(n_rows, -1).clone() for x in data["position_ids"].unbind())
            data["position_ids"] = cases.jagged(rows)
        return data

    expected = cases.score(fresh, batch(1))["log_probs"]
    found = cases.score(fresh, batch(4))["log_probs"]
    assert all(map(torch.equal, found, expected))
    data = batch(4)
    data["position_ids"].unbind()[3][2, -1] += 1
    with pytest.raises(ValueError, match="got position_ids whose rows differ, as for images"):
        cases.score(fresh, data)


@pytest.mark.parametrize("mode", ["seq-mean-token-sum", "seq-mean-token-mean"])
def test_fully_masked_samples_count_in_means_over_sequences(fresh, folder, mode):
    """Holds for verl's losses, and for our weights with `count_empty`."""
    loss_function = partial(ppo_loss, config=cases.actor_config(loss_agg_mode=mode))

    def batch():
        data = cases.batch_of("ppo", 0)
        data["response_mask"][5] = 0
        return data

    data = batch()
    num_tokens = data["response_mask"].sum().item()
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=num_tokens)
    outputs = cases.outputs_of(cases.load_model(folder), data)
    expected, _ = loss_function(model_output=outputs, data=data, dp_group=None)
    fresh.set_loss_fn(loss_function)
    metrics = tu.get(fresh.train_batch(batch()), "metrics")
    assert metrics["loss"] == pytest.approx(expected.item(), rel=1e-5)

    losses, mask = torch.rand(data["response_mask"].shape), data["response_mask"]
    weights = torch.stack(aggregation_weights(list(mask), mode, count_empty=True))
    of_verl = agg_loss(losses, mask, mode, global_batch_size=cases.SAMPLES)
    torch.testing.assert_close((weights * losses).sum(), of_verl)


@pytest.mark.parametrize("temperature", [0.7, torch.linspace(0.5, 2.0, cases.SAMPLES)])
def test_temperature_divides_logits_of_all_scores(fresh, folder, temperature):
    wanted = dict(calculate_entropy=True, calculate_sum_pi_squared=True)
    data = cases.make_batch(0, temperature=temperature, **wanted)
    model, outputs = cases.load_model(folder), cases.score(fresh, data)
    with torch.no_grad():
        expected = cases.samples_of(cases.outputs_of(model, data))
        temperatures = torch.as_tensor(temperature).expand(cases.SAMPLES)
        expected["sum_pi_squared"] = [
            F.softmax(model(tokens[None]).logits[0] / t, -1).square().sum(-1)
            for tokens, t in zip(data["input_ids"].unbind(), temperatures, strict=True)
        ]
    cases.assert_same_outputs(outputs, expected)


def test_split_primitives_add_gradients_up(fresh):
    """As verl's Tinker worker calls them: two halves, then one step."""
    engine, loss_function = fresh.engine, cases.loss_of("sft")
    with engine.train_mode():
        expected = engine.train_batch(cases.batch_of("sft", 0), loss_function)["metrics"]
    fresh.reset()
    engine.optimizer_zero_grad()
    data = cases.batch_of("sft", 0)
    tokens = data["loss_mask"].values().sum()
    for half in tu.chunk_tensordict(data, 2):
        share = half["loss_mask"].values().sum() / tokens
        with engine.train_mode(zero_grad_on_exit=False):
            engine.forward_backward_batch(
                half, lambda share=share, **kw: (loss_function(**kw)[0] * share, {})
            )
    with engine.train_mode():
        norm = engine.optimizer_step()
    assert norm == pytest.approx(expected["grad_norm"], rel=5e-6)


def test_mini_batches_step_the_schedule_once(fresh):
    """As verl's PPO calls it: two mini-batches, two epochs, four steps of the optimizer."""
    engine = fresh.engine
    halves = tu.chunk_tensordict(cases.batch_of("ppo", 0), 2)
    with engine.train_mode():
        for half in halves * 2:
            engine.train_batch(half, cases.loss_of("ppo"))
    expected = {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}
    fresh.reset()
    fresh.set_loss_fn(cases.loss_of("ppo"))
    loader = {"dataloader_kwargs": {"shuffle": False}, "seed": 0}
    data = cases.batch_of("ppo", 0, num_mini_batch=2, epochs=2, **loader)
    metrics = tu.get(fresh.train_mini_batch(data), "metrics")
    assert len(metrics["grad_norm"]) == 4 and len(metrics["lr"]) == 1
    assert {"actor/entropy_loss", "kl_loss", "actor/pg_loss"} <= metrics.keys()
    assert engine.engine.lr_schedulers.last_epoch == 1
    for name, tensor in engine.get_per_tensor_param()[0]:
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=1e-6)


REFUSED = {
    "distillation_use_topk": (True, "distillation from a teacher's top-k"),
    "distillation_only": (True, "distillation without log-probabilities"),
    "enable_routing_replay": (True, "requests routing replay, got engine.router_replay.mode"),
    "pad_mode": ("left_right", "got pad_mode = 'left_right'"),
    "multi_modal_inputs": ([{"pixel_values": 0}] * cases.SAMPLES, "got multi_modal_inputs"),
    "calculate_sum_pi_squared": (True, "sum of squared probabilities in training"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_unsupported_switch_of_a_batch_is_refused_by_name(worker, key):
    value, words = REFUSED[key]
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        cases.train(worker, "sft", range(1), **{key: value})
    assert str(error.value).count(". ") == 0  # one sentence


# ---- routing replay ----


def experts_of(model, data):
    """The experts of a Hugging Face model [S, j, L, k], jagged, as a rollout records them: zeros for
    each sample's last token."""
    of_samples = []
    for tokens in data["input_ids"].unbind():
        logits = model(tokens[None], output_router_logits=True).router_logits
        chosen = torch.stack([x.topk(2, dim=-1).indices for x in logits], dim=1)
        chosen[-1] = 0
        of_samples.append(chosen.to(torch.int16))
    return cases.jagged(of_samples)


def test_experts_of_a_rollout_are_replayed(tmp_path, alone):
    folder = cases.save_model(str(tmp_path), "qwen3_moe")
    own, data = cases.load_model(folder), cases.make_batch(0, calculate_entropy=True)
    with torch.no_grad():
        expected = cases.outputs_of(own, data)
        data["routed_experts"] = experts_of(own, data)
    worker = cases.make_worker(folder, router_replay=EngineRouterReplayConfig(mode="R3"))
    scores = cases.score(worker, data)
    for name, samples in expected.items():
        for ours, theirs in zip(scores[name], samples.unbind(), strict=True):
            assert (ours - theirs)[:-1].abs().max() <= cases.MAX_DIFFERENCE
    # Other experts give other numbers.
    data["routed_experts"] = cases.jagged(3 - x for x in data["routed_experts"].unbind())
    pairs = zip(cases.score(worker, data)["log_probs"], scores["log_probs"], strict=True)
    assert max((a - b).abs().max() for a, b in pairs) > 1e-3
    del data["routed_experts"]
    with pytest.raises(ValueError, match="needs routed_experts in each batch"):
        cases.score(worker, data)
    worker.engine.engine.close()


# ---- shared prefixes ----


@pytest.mark.parametrize("kind", ["ppo", "value"])
def test_samples_that_share_their_prefixes_train_as_in_transformers(kind, tmp_path, alone):
    folder = cases.save_model(str(tmp_path), "qwen3", is_critic=kind == "value")
    model_type = "value_model" if kind == "value" else "language_model"
    worker = cases.make_worker(folder, model_type, share_prefixes=True)
    settings = dict(n_alike=4, micro_batch_size_per_gpu=4)
    if kind == "ppo":
        settings["temperature"] = torch.tensor([0.7, 0.7, 0.7, 1.3, 1.0, 1.0, 1.0, 1.0])
    cases.assert_same_run(
        cases.train(worker, kind, **settings), cases.reference(folder, kind, **settings)
    )
    worker.engine.engine.close()


def test_a_token_is_shared_with_its_label_temperature_and_experts():
    experts = torch.zeros(4, 5, 1, 2, dtype=torch.int16) + torch.tensor([1, 2])
    experts[2, 1:] = torch.tensor([3, 4])
    tokens = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [5, 6, 7, 8, 9], [5, 6, 7, 1, 1]])
    data = cases.batch_of_samples(list(tokens.clone()))
    data["routed_experts"] = cases.jagged(experts)
    row = pack(data, 0, True, True)
    # Samples 0 and 1 are equal; 3 has another label from 7 on; 2 has other experts from 6 on.
    assert row["input"].numel() == 5 + 3 + 4
    assert torch.equal(unpack(row["input"], data).values(), tokens.flatten())
    assert torch.equal(unpack(row["routed_experts"], data).values(), experts.flatten(0, 1))
    data["temperature"] = torch.tensor([1.0, 0.5, 1.0, 1.0])
    assert pack(data, 0, True, True)["input"].numel() == 5 + 3 + 4 + 5


# ---- over ranks ----


def tempered(folder, layouts):
    """layout -> (scores with a temperature per sample, gradient norm or None), on each rank.

    Four samples begin alike, and share these tokens in all layouts but "one".
    """
    temperature = torch.tensor([0.5, 0.5, 0.7, 0.5, 1.0, 1.3, 1.7, 2.0])
    settings = dict(temperature=temperature, n_alike=4)
    results = {}
    for name in layouts:
        shares = {"share_prefixes": name != "one"}
        worker = cases.make_worker(folder, **shares, **cases.LAYOUTS[name])
        scores = cases.score(worker, cases.make_batch(0, calculate_entropy=True, **settings))
        data = cases.make_batch(0, calculate_sum_pi_squared=True, **settings)
        scores |= cases.score(worker, data)
        worker.set_loss_fn(cases.loss_of("ppo"))
        split = dict(use_dynamic_bsz=True, max_token_len_per_gpu=40)
        output = worker.train_batch(cases.batch_of("ppo", 0, **settings, **split))
        norm = None if output is None else tu.get(output, "metrics")["grad_norm"]
        results[name] = scores, norm
    return results


def test_temperature_per_sample_and_shared_prefixes_in_all_layouts(folder):
    """The layouts cut rows, pad them, or send them through a pipeline."""
    (alone,) = cases.on_ranks(1, tempered, folder, ["one"])
    scores, norm = alone["one"]
    assert scores.keys() == {"log_probs", "entropy", "sum_pi_squared"}
    ranks = cases.on_ranks(2, tempered, folder, ["tp", "pp", "cp"])
    for name in ranks[0]:
        ((other_scores, other_norm),) = [rank[name] for rank in ranks if rank[name][1] is not None]
        assert other_norm == pytest.approx(norm, rel=5e-6), name
        for key, samples in scores.items():
            torch.testing.assert_close(other_scores[key], samples, rtol=0, atol=5e-6)
