"""LoRA in verl's engine interface: `peft` trains the same adapters, and workers get what they ask for."""

import dataclasses
import json

import peft
import pytest
import torch
import transformers

from tests.verl import cases
from tests.verl.test_parity import merged

LORA = dict(lora_rank=4, lora_alpha=8, lora={"merge": True})


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """family -> (folder of the base, folder of adapters that change it)."""
    folder = tmp_path_factory.mktemp("models")
    found = {}
    for family in ("qwen3", "llama3"):
        base = cases.save_model(str(folder), family)
        config = peft.LoraConfig(
            r=4,
            lora_alpha=12,
            target_modules=["q_proj", "o_proj", "down_proj"],
            rank_pattern={"down_proj": 2},
            init_lora_weights=False,
            task_type="CAUSAL_LM",
        )
        torch.manual_seed(3)
        adapted = peft.get_peft_model(cases.load_model(base), config)
        adapted.save_pretrained(str(folder / f"{family}_adapters"))
        found[family] = base, str(folder / f"{family}_adapters")
    return found


def records_of(models, layouts):
    records = {}
    for family, (base, adapters) in models.items():
        model = dict(lora_adapter_path=adapters, lora={"merge": True})
        for layout, kind in layouts:
            worker = cases.make_worker(base, model=model, **cases.LAYOUTS[layout])
            records[family, kind, layout] = cases.train(worker, kind)
    return records


SLOW = [("fsdp", "sft"), ("fsdp", "ppo"), ("tp", "sft"), ("pp", "ppo")]


@pytest.mark.parametrize(
    "n_ranks, layouts",
    [
        (1, [("one", "sft"), ("one", "ppo")]),
        (2, [("tp", "ppo"), ("pp", "sft")]),
        pytest.param(2, SLOW, marks=pytest.mark.slow),
    ],
)
def test_adapters_train_as_in_peft(models, n_ranks, layouts):
    ranks = cases.on_ranks(n_ranks, records_of, models, layouts)
    for case in ranks[0]:
        (base, adapters), kind = models[case[0]], case[1]
        cases.assert_same_run(merged(ranks, case), cases.reference(base, kind, adapters))


def test_reference_is_the_actor_without_adapters(alone, models):
    base, adapters = models["qwen3"]
    worker = cases.make_worker(base, model=dict(lora_adapter_path=adapters))
    plain = cases.make_worker(base)
    data = cases.batch_of("sft", 0)
    expected = cases.score(plain, cases.batch_of("sft", 0))
    with worker.engine.disable_adapter(), worker.engine.eval_mode():
        cases.assert_same_outputs(cases.score(worker, data), expected)
    with pytest.raises(AssertionError):
        cases.assert_same_outputs(cases.score(worker, cases.batch_of("sft", 0)), expected)


def test_rollouts_get_merged_weights_and_checkpoints_hold_adapters(alone, models, tmp_path):
    base, _ = models["qwen3"]
    contents = dict(save_contents=["model", "optimizer", "extra", "hf_model"])
    worker = cases.make_worker(base, model=LORA, checkpoint=contents)
    cases.train(worker, "sft", range(2))
    worker.save_checkpoint(str(tmp_path), global_step=2)
    merged_model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "huggingface")
    weights, config = worker.engine.get_per_tensor_param()
    assert config is None
    state = merged_model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in weights)

    adapted = peft.PeftModel.from_pretrained(cases.load_model(base), str(tmp_path / "lora_adapter"))
    tokens = torch.arange(1, 20)[None]
    with torch.no_grad():
        difference = adapted(tokens).logits - merged_model(tokens).logits
    assert difference.abs().max() < 1e-5
    config = json.loads((tmp_path / "lora_adapter/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, base)

    expected = cases.train(worker, "sft", range(2, 4))
    resumed = cases.make_worker(base, model=LORA)
    resumed.load_checkpoint(str(tmp_path))
    again = cases.train(resumed, "sft", range(2, 4))
    assert dataclasses.astuple(again)[:2] == dataclasses.astuple(expected)[:2]


def test_settings_without_merging_are_refused_where_a_rollout_asks(alone, models):
    worker = cases.make_worker(models["qwen3"][0], model=LORA | {"lora": {}})
    with pytest.raises(ValueError, match="model.lora.merge = false .* set it to true"):
        worker.engine.get_per_tensor_param()
