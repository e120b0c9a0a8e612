"""Checkpoints through verl's interface, in this and other layouts, and weights for rollouts."""

import json
import os

import pytest
import torch
import transformers
from safetensors.torch import load_file
from verl.checkpoint_engine.delta_sync.sparse_gather import gather_slot_entries_to_rank0

from tests.verl import cases

SCHEDULE = dict(lr_warmup_steps=2, total_training_steps=10, min_lr_factor=0.1)


def weights_of(engine):
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()[0]}


def assert_same(ours, theirs, **tolerance):
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, **(tolerance or dict(rtol=0, atol=0)))


# ---- saving and loading ----


def test_total_steps_may_be_set_after_construction(alone, folder):
    worker = cases.make_worker(folder, optim=dict(lr_warmup_steps=0, min_lr_factor=0.0))
    assert worker.engine.lr_scheduler_step() == cases.LR
    worker.optimizer_config.total_training_steps = 4
    worker.reset()
    rates = [worker.engine.lr_scheduler_step() for _ in range(3)]
    assert rates == pytest.approx([cases.LR * left / 4 for left in (3, 2, 1)])


def test_only_the_newest_checkpoints_of_the_run_are_kept(alone, folder, tmp_path):
    (tmp_path / "global_step_0" / "of_another").mkdir(parents=True)
    worker = cases.make_worker(folder)
    for step in range(1, 5):
        path = tmp_path / f"global_step_{step}"
        worker.save_checkpoint(str(path), global_step=step, max_ckpt_to_keep=2)
        (path / "data_0.pt").write_text("the trainer's")
    assert sorted(os.listdir(tmp_path)) == ["global_step_0", "global_step_3", "global_step_4"]
    resumed = cases.make_worker(folder)
    resumed.load_checkpoint(str(tmp_path / "global_step_4"))
    resumed.save_checkpoint(str(tmp_path / "global_step_5"), global_step=5, max_ckpt_to_keep=1)
    assert sorted(os.listdir(tmp_path)) == ["global_step_0", "global_step_3", "global_step_5"]


WHOLE = ["model", "optimizer", "extra"]


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [(["model"], ["model"]), (["hf_model"], ["hf_model"]), (WHOLE, WHOLE), (WHOLE, WHOLE[::2])],
)
def test_contents_say_what_is_saved_and_loaded(alone, folder, tmp_path, saved, loaded):
    checkpoint = dict(save_contents=saved, load_contents=loaded)
    worker = cases.make_worker(folder, optim=SCHEDULE, checkpoint=checkpoint)
    cases.train(worker, "sft", range(2))
    worker.save_checkpoint(str(tmp_path / "a"), global_step=2)
    assert os.path.isdir(tmp_path / "a/huggingface") == ("hf_model" in saved)
    resumed = cases.make_worker(folder, optim=SCHEDULE, checkpoint=checkpoint)
    resumed.load_checkpoint(str(tmp_path / "a"))
    assert_same(weights_of(resumed.engine), weights_of(worker.engine))
    engine = resumed.engine.engine
    assert engine.lr_schedulers.last_epoch == (2 if "extra" in loaded else 0)
    steps = [state["step"] for state in engine.optimizers.state.values() if state]
    assert any(steps) == ("optimizer" in loaded)


def test_hf_folder_is_one_that_transformers_loads(alone, folder, tmp_path):
    worker = cases.make_worker(folder, checkpoint=dict(save_contents=["hf_model"]))
    worker.model_config.tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file="tests/assets/tokenizer/tokenizer.json"
    )
    record = cases.train(worker, "sft")
    worker.save_checkpoint(str(tmp_path), global_step=3)
    model = cases.load_model(str(tmp_path / "huggingface"))
    with torch.no_grad():
        expected = cases.outputs_of(model, cases.make_batch(0, calculate_entropy=True))
    cases.assert_same_outputs(record.outputs, cases.samples_of(expected))
    names = set(os.listdir(tmp_path / "huggingface"))
    assert {"config.json", "tokenizer.json", "generation_config.json"} <= names
    saved = json.loads((tmp_path / "huggingface/config.json").read_text())
    assert saved["architectures"] == ["Qwen3ForCausalLM"]


def test_critic_of_a_language_model_is_saved_for_transformers(alone, folder, tmp_path):
    contents = dict(save_contents=["hf_model"])
    worker = cases.make_worker(folder, "value_model", checkpoint=contents)
    weights = weights_of(worker.engine)
    body = load_file(os.path.join(folder, "model.safetensors"))
    del body["lm_head.weight"]
    assert_same({k: v for k, v in weights.items() if k in body}, body)
    assert weights["score.weight"].std() > 0 and not weights["score.bias"].any()
    record = cases.train(worker, "value")
    worker.save_checkpoint(str(tmp_path), global_step=3)
    critic = cases.load_model(str(tmp_path / "huggingface"), is_critic=True)
    with torch.no_grad():
        values = cases.values_of(critic, cases.make_batch(0))["values"]
    torch.testing.assert_close(record.outputs["values"], list(values.unbind()), rtol=0, atol=5e-6)
    again = cases.make_worker(str(tmp_path / "huggingface"), "value_model")
    assert_same(weights_of(again.engine), weights_of(worker.engine))


def continue_in_layouts(folder, path, layouts):
    """Losses and weights after steps 2 and 3 in each layout; the first one saves steps 0 and 1."""
    results = []
    for i, name in enumerate(layouts):
        worker = cases.make_worker(folder, optim=SCHEDULE, **cases.LAYOUTS[name])
        if i == 0:
            cases.train(worker, "sft", range(2))
            worker.save_checkpoint(path, global_step=2)
        else:
            worker.load_checkpoint(path)
        record = cases.train(worker, "sft", range(2, 4))
        results.append((record.losses, weights_of(worker.engine)))
    return results


def test_checkpoint_of_one_layout_continues_in_another(folder, tmp_path):
    arguments = folder, str(tmp_path / "global_step_2"), ["fsdp", "tp", "pp", "cp"]
    for (losses, weights), *others in cases.on_ranks(2, continue_in_layouts, *arguments):
        for other_losses, other_weights in others:
            if other_losses:
                torch.testing.assert_close(other_losses, losses, rtol=1e-5, atol=0)
            assert_same(other_weights, weights, rtol=0, atol=1e-5)


# ---- weights for a rollout ----


def apply_deltas(folders_and_sizes):
    """For each case, True on rank 0 if old weights plus deltas are the new weights."""
    results = []
    for folder, sizes in folders_and_sizes:
        engine = cases.make_worker(folder, **sizes).engine
        received = weights_of(engine)
        engine.prime_delta_snapshots()
        for step in range(2):
            data = cases.share_of(cases.batch_of("sft", step), engine)
            with engine.train_mode():
                engine.train_batch(data, cases.loss_of("sft"))
            n_changes = 0
            for entry in engine.get_per_tensor_param_delta_shard()[0]:
                ((name, shape),), dtype, counts, positions, values, group = entry
                assert str(received[name].dtype) == f"torch.{dtype}"
                assert received[name].shape == shape
                gathered = gather_slot_entries_to_rank0(positions, values, counts, group=group)
                if gathered is not None:
                    ((where, what),) = gathered
                    n_changes += len(where)
                    assert len(where.unique()) == len(where), "a change came twice"
                    received[name].view(-1)[where.long()] = what
            expected = weights_of(engine)
            if torch.distributed.get_rank() == 0:
                assert_same(received, expected)
                results.append(n_changes)
        left = sum(int(entry[2]) for entry in engine.get_per_tensor_param_delta_shard()[0])
        assert left == 0, "changes come once"
    return results


def test_deltas_of_shards_turn_old_weights_into_new_ones(folder, tmp_path):
    llama = cases.save_model(str(tmp_path), "llama3")
    moe = cases.save_model(str(tmp_path), "qwen3_moe")
    ep = {"data_parallel_shard_size": 2, "expert_parallel_size": 2}
    layouts = [sizes for sizes in cases.LAYOUTS.values() if sizes]
    todo = [(llama, sizes) for sizes in layouts] + [(folder, layouts[0]), (moe, ep)]
    changes, _ = cases.on_ranks(2, apply_deltas, todo)
    assert len(changes) == 2 * len(todo) and min(changes) > 1000


# ---- scoring, offloading ----


def test_forward_only_engine_scores_and_has_no_optimizer_state(alone, folder):
    expected = cases.score(cases.make_worker(folder), cases.make_batch(0))
    worker = cases.make_worker(folder, forward_only=True)
    cases.assert_same_outputs(cases.score(worker, cases.make_batch(0)), expected)
    with pytest.raises(RuntimeError, match="forward_only"):
        worker.engine.train_batch(cases.batch_of("sft", 0), cases.loss_of("sft"))


def test_offloaded_engine_trains_as_another(alone, folder):
    expected = cases.train(cases.make_worker(folder), "ppo")
    worker = cases.make_worker(folder, param_offload=True, optimizer_offload=True)
    assert worker.engine.is_param_offload_enabled and worker.engine.is_optimizer_offload_enabled
    record = cases.train(worker, "ppo")
    assert (record.losses, record.norms) == (expected.losses, expected.norms)
    worker.to("cpu")
    worker.to("device")
