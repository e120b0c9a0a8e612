"""Learn to copy three letters with your own loop on the client with Tinker's names: one minute."""

from torchtitan.config import ConfigManager
from torchtitan.experiments.rl_toy.tasks import CopyTask
from torchtitan.rl.client import AdamParams, Datum, LocalTrainingClient, ModelInput, SamplingParams
from torchtitan.rl.job_config import JobConfig

FLAGS = "--model.name=rl_toy --training.seq_len=16 --training.local_batch_size=256 --debug.seed=0"
FLAGS += " --training.mixed_precision_param=float32 --activation_checkpoint.mode=none"


def datum(prompt, sequence, advantage):
    tokens, before = [*prompt, *sequence.tokens], [0.0] * (len(prompt) - 1)
    inputs = {"target_tokens": tokens[1:], "logprobs": before + sequence.logprobs}
    gains = [advantage - 0.02 * p for p in sequence.logprobs]  # with a bonus for entropy
    inputs |= {"advantages": before + gains, "mask": before + [1.0] * len(gains)}
    return Datum(ModelInput.from_ints(tokens[:-1]), inputs)


def learn(steps=150, samples=16):
    task = CopyTask(length=3, num_letters=8)
    params = SamplingParams(max_tokens=4, stop=[task.tokenizer.eos_id])
    with LocalTrainingClient(ConfigManager(JobConfig).parse_args(FLAGS.split())) as client:
        for _ in range(steps):
            sampler = client.save_weights_and_get_sampling_client().result()
            data, total = [], 0.0
            for prompt in task.sample(16):
                found = sampler.sample(ModelInput(prompt.token_ids), samples, params).result()
                texts = [task.tokenizer.decode(sequence.tokens) for sequence in found.sequences]
                rewards = [task.grade(prompt, text).reward for text in texts]
                gains, total = [r - sum(rewards) / samples for r in rewards], total + sum(rewards)
                data += map(datum, [prompt.token_ids] * samples, found.sequences, gains)
            client.forward_backward(data, "importance_sampling")
            client.optim_step(AdamParams(learning_rate=3e-3, grad_clip_norm=1.0)).result()
            yield total / len(data)


if __name__ == "__main__":
    for step, share in enumerate(learn(), 1):
        print(f"step {step}: {share:.1%} of the letters are right", flush=True)
