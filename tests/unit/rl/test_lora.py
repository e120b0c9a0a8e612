"""RL with adapters: a reference without memory, merged weights for the generator, small copies."""

import torch

from tests.unit.rl.toy import toy_samples

LORA = ["--model.converters=lora", "--lora.rank=4", "--optimizer.lr=1e-2"]
KL = "--rl.loss.kl_coef=0.1"


def logprobs(controller, scores):
    batch = controller.batcher.batch(toy_samples(3))
    return torch.cat([values for values in scores(batch) if values is not None])


def test_reference_is_the_model_without_adapters_and_copies_nothing(start):
    controller = start(*LORA, KL)
    first = logprobs(controller, controller.trainer.forward)
    for _ in range(2):
        metrics = controller.train_step()
    assert metrics["loss/kl_ref"] > 0
    assert torch.equal(logprobs(controller, controller.reference.logprobs), first)
    assert not torch.equal(logprobs(controller, controller.trainer.forward), first)
    assert controller.reference.state_dict() == {}
    assert "rl_reference" not in controller.checkpointer.states


def test_folders_for_peft_are_written_though_steps_come_two_at_a_time(tmp_path, start):
    flags = ["--rl.minibatches=2", "--training.steps=10", "--checkpoint.enable"]
    flags += ["--checkpoint.interval=4", "--checkpoint.save_peft_interval=3"]
    start(*LORA, *flags).train()
    found = {path.name for path in (tmp_path / "checkpoint").iterdir() if path.is_dir()}
    # Steps 3, 6 and 9 are passed at the ends of the batches.
    peft = {"peft-step-4", "peft-step-6", "peft-step-10"}
    assert found == {"step-4", "step-8", "step-10"} | peft


def test_critic_with_adapters_continues_with_the_policys_base(tmp_path, start):
    start("--debug.seed=8").trainer.save_checkpoint(str(tmp_path / "base"))
    flags = ["--rl.advantage.name=gae", "--checkpoint.enable", "--checkpoint.interval=1"]
    flags += [f"--checkpoint.initial_load_path={tmp_path / 'base'}"]
    controller = start(*LORA, *flags)
    controller.train_step()
    controller.checkpointer.save(1, force=True)
    values = logprobs(controller, controller.critic.forward)
    expected = controller.train_step()
    resumed = start(*LORA, *flags)
    assert torch.equal(logprobs(resumed, resumed.critic.forward), values)
    again = resumed.train_step()
    names = [name for name in expected if name.startswith(("loss", "critic"))]
    assert names and all(again[name] == expected[name] for name in names)
