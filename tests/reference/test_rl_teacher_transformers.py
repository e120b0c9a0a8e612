"""On-policy distillation: the loss of `[rl.teacher]` is a plain computation with transformers."""

import json

import pytest
import torch
import torch.nn.functional as F

from tests.distillation_jobs import VOCAB, make_folders, sums_of
from tests.reliability.jobs import flags_in
from tests.unit.rl.toy import gradients
from torchtitan.config import ConfigManager
from torchtitan.config.checks import ConfigError
from torchtitan.config.job_config import Loss
from torchtitan.data.tokenizer import HuggingFaceTokenizer
from torchtitan.rl.batcher import Batcher
from torchtitan.rl.controller import Controller
from torchtitan.rl.job_config import JobConfig
from torchtitan.rl.policy import PolicyTrainer
from torchtitan.rl.types import TrainingSample

transformers = pytest.importorskip("transformers")

# Ours -> transformers'.
SOME_WEIGHTS = {
    "output.weight": "lm_head.weight",
    "tok_embeddings.weight": "model.embed_tokens.weight",
    "layers.0.feed_forward.w1.weight": "model.layers.0.mlp.gate_proj.weight",
}


def length_reward(completion: str, answer: str) -> float:
    return float(len(completion) % 3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    make_folders(folder)
    prompts = [{"prompt": f"{i} and", "answer": ""} for i in range(16)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(p) + "\n" for p in prompts))
    return folder


def rl_config(folder, out, *flags):
    own = flags_in(f"""
        job.dump_folder={out} model.name=llama3 model.hf_config={folder}/student debug.seed=0
        model.hf_assets_path={folder}/student checkpoint.initial_load_in_hf training.seq_len=32
        training.local_batch_size=4 training.mixed_precision_param=float32
        activation_checkpoint.mode=none lr_scheduler.warmup_steps=0
        rl.task.name=jsonl rl.task.path={folder}/prompts.jsonl rl.num_prompts_per_step=4
        rl.task.reward_fn={__name__}:length_reward rl.num_samples_per_prompt=4
        rl.sampling.max_tokens=8 rl.teacher.folder={folder}/teacher
    """)
    return ConfigManager(JobConfig).parse_args([*own, *flags])


def made_up_samples(n):
    generator = torch.Generator().manual_seed(0)

    def draw(length):
        return torch.randint(0, VOCAB, (length,), generator=generator).tolist()

    return [
        TrainingSample.from_sequence(
            draw(2 + i), draw(5 - i), [-7.0] * (5 - i), i - 1.0, group_id=i
        )
        for i in range(n)
    ]


@pytest.mark.parametrize(
    "settings, policy_weight",
    [({"divergence": "reverse", "top_k": 0}, 0.0), ({"divergence": "forward", "top_k": 8}, 0.5)],
)
def test_loss_and_gradients_are_those_of_transformers(settings, policy_weight, folder, tmp_path):
    own = settings | {"policy_weight": policy_weight, "kl_weight": 0.3}
    flags = [f"--rl.teacher.{key}={value}" for key, value in own.items()]
    flags += ["--rl.sampling.temperature=1.5"]
    config = rl_config(folder, tmp_path, *flags, "--rl.loss.name=importance_sampling")
    with pytest.raises(ConfigError, match="folder = .* needs the tokenizer of the samples"):
        PolicyTrainer(config)
    trainer = PolicyTrainer(config, tokenizer=HuggingFaceTokenizer(str(folder / "student")))
    trainer.load_checkpoint()
    samples = made_up_samples(3)
    batch = Batcher.from_config(config, trainer.engine.dp_size).batch(samples)
    output = trainer.forward_backward(batch)
    found = gradients(trainer)
    trainer.close()

    student, teacher = (
        transformers.AutoModelForCausalLM.from_pretrained(folder / name)
        for name in ("student", "teacher")
    )
    loss = Loss(**settings, kl_weight=0.3, temperature=1.5)
    num_tokens = sum(int(sample.loss_mask.sum()) for sample in samples)
    total, kl = torch.zeros((), dtype=torch.float64), 0.0
    for sample in samples:
        tokens = sample.token_ids[None]
        labels = sample.labels.where(sample.loss_mask == 1, -100)
        logits = student(tokens).logits[0]
        with torch.no_grad():
            of_teacher = teacher(tokens).logits[0]
        of_sample, of_kl, _ = sums_of(logits, of_teacher, labels, loss)
        logprobs = F.log_softmax(logits / 1.5, -1).gather(-1, sample.labels[:, None]).squeeze(-1)
        ratio = (logprobs - sample.logprobs).exp()
        policy = -(ratio * sample.advantages * sample.loss_mask).sum()
        total = total + (of_sample + policy_weight * policy) / num_tokens
        kl += of_kl.item() / num_tokens
    total.backward()
    assert output.loss == pytest.approx(total.item(), rel=1e-5)
    assert output.metrics["kl_teacher"] == pytest.approx(kl, rel=1e-5)
    expected = dict(student.named_parameters())
    for name, theirs in SOME_WEIGHTS.items():
        known = expected[theirs].grad
        assert (found[name] - known).abs().max() <= 2e-5 * known.abs().max(), name


def test_policy_moves_to_its_teacher_on_its_own_samples(folder, tmp_path):
    flags = ["--rl.teacher.policy_weight=0", "--optimizer.lr=1e-2", "--training.steps=16"]
    controller = Controller(rl_config(folder, tmp_path, *flags))
    controller.setup()
    kl = [controller.train_step()["loss/kl_teacher"] for _ in range(16)]
    controller.close()
    assert sum(kl[-3:]) < 0.85 * sum(kl[:3])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--rl.teacher.folder=nowhere"], "rl.teacher.folder = 'nowhere' cannot .* cannot be read"),
        (["--rl.teacher.folder=", "--rl.teacher.top_k=3"], "rl.teacher.top_k = 3 has no effect"),
        (["--rl.teacher.top_k=2048"], "logits of 2048 vocabulary entries, .* top_k = 2048"),
        (["--rl.batch.skip_zero_advantage"], "other loss terms are not, got rl.teacher.folder"),
        (["--loss.name=dpo"], "loss.name = 'dpo' is for a trainer with data; leave it out"),
    ],
)
def test_bad_setting_is_refused_by_name(flags, message, folder, tmp_path):
    with pytest.raises(ConfigError, match=message):
        Controller(rl_config(folder, tmp_path, *flags))
