"""Faults of reinforcement learning: rewards, prompts, generators."""

from pathlib import Path

from tests.reliability import jobs
from tests.reliability.faults import Fault

REWARDS = "tests.reliability.hostile_rewards"
PROMPTS = '{"prompt": "one two"}\n{"prompt": "three"}\n'


def rl_job(*arguments: str, reward: str = f"{REWARDS}:good", prompts: str = PROMPTS, **more):
    """A job whose prompts are in a file."""

    def arrange(folder: Path) -> list[str]:
        (folder / "prompts.jsonl").write_text(prompts)
        own = jobs.flags_in(f"""
            rl.task.name=jsonl rl.task.path={folder}/prompts.jsonl rl.task.reward_fn={reward}
            rl.num_prompts_per_step=2 rl.num_samples_per_prompt=2 rl.sampling.max_tokens=4
        """)
        return [*own, *arguments]

    return Fault(arrange, module="torchtitan.rl.train", **more)


FAULTS = {
    "reward function that raises": rl_job(reward=f"{REWARDS}:raises"),
    "reward function that raises on one rank": rl_job(
        reward=f"{REWARDS}:raises_on_rank_one", ranks=2
    ),
    "reward function that ends the process": rl_job(reward=f"{REWARDS}:exits"),
    "reward that is not a number": rl_job(reward=f"{REWARDS}:returns_nan"),
    "reward function of other arguments": rl_job(reward=f"{REWARDS}:takes_one"),
    "module of rewards that is not there": rl_job(reward="no.such:reward"),
    "module of rewards that ends the process": rl_job(
        reward="tests.reliability.broken:reward", environment={"BROKEN": "exit"}
    ),
    "reward function that is none": rl_job(reward=f"{REWARDS}:not_a_function"),
    "temperature that is not a number": rl_job("--rl.sampling.temperature=nan"),
    "new weights within a completion, without steps ahead": rl_job("--rl.generator.in_flight"),
    "tool whose schema is none": rl_job(
        f"--rl.task.tools={REWARDS}:tool_without_a_name", "--rl.task.max_turns=2"
    ),
    "vLLM that is not installed": rl_job("--rl.generator.backend=vllm"),
    "prompt of another kind": rl_job(prompts='{"prompt": "one"}\n{"question": "two"}\n'),
    "prompt that is no text": rl_job(prompts='{"prompt": "\\ud800"}\n'),
}
