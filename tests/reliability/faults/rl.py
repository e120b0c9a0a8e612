"""Faults of reinforcement learning: rewards, prompts, generators."""

from pathlib import Path

from tests.reliability.faults import Fault

REWARDS = "tests.reliability.hostile_rewards"
PROMPTS = '{"prompt": "one two"}\n{"prompt": "three"}\n'


def rl_fault(
    name: str,
    message: str,
    cause: str,
    remedy: str,
    *arguments: str,
    reward: str = f"{REWARDS}:good",
    prompts: str = PROMPTS,
    **more,
) -> Fault:
    """A job whose prompts are in a file."""

    def arrange(folder: Path) -> list[str]:
        (folder / "prompts.jsonl").write_text(prompts)
        return [
            "--rl.task.name=jsonl",
            f"--rl.task.path={folder}/prompts.jsonl",
            f"--rl.task.reward_fn={reward}",
            "--rl.num_prompts_per_step=2",
            "--rl.num_samples_per_prompt=2",
            "--rl.sampling.max_tokens=4",
            *arguments,
        ]

    return Fault(name, message, cause, remedy, arrange, module="torchtitan.rl.train", **more)


RETURNS = (
    "error: the function rl.task.reward_fn must return a finite number, at most 1e+18 in size, got "
)
MENDS_REWARD = "Correct the reward function; the message has the completion and the answer."

FAULTS = [
    rl_fault(
        "reward function that raises",
        "error: grading failed at …hostile_rewards.py, line 8: ZeroDivisionError: division by zero; "
        "the completion was …, the expected answer ''; correct the reward function",
        "A case that the function does not expect.",
        MENDS_REWARD,
        reward=f"{REWARDS}:raises",
        exit_code=1,
    ),
    rl_fault(
        "reward function that raises on one rank",
        "error: rank 1 could not draw or grade its episodes: …ZeroDivisionError…",
        "A case that the function does not expect. All ranks end together; rank 1 has its line, too.",
        MENDS_REWARD,
        reward=f"{REWARDS}:raises_on_rank_one",
        exit_code=1,
        ranks=2,
    ),
    rl_fault(
        "reward function that ends the process",
        "error: grading failed at …hostile_rewards.py, line 12: SystemExit: 0; …",
        "It calls sys.exit(), as scripts do.",
        "Let it return a reward.",
        reward=f"{REWARDS}:exits",
        exit_code=1,
    ),
    rl_fault(
        "reward that is not a number",
        RETURNS + "nan for the completion …",
        "For example, 0 was divided by 0.",
        MENDS_REWARD,
        reward=f"{REWARDS}:returns_nan",
        exit_code=1,
    ),
    rl_fault(
        "reward that is too large",
        RETURNS + "1e+308 for the completion …",
        "A penalty was written as the largest number there is; sums of such numbers overflow.",
        "Return a number of an ordinary size.",
        reward=f"{REWARDS}:returns_huge",
        exit_code=1,
    ),
    rl_fault(
        "reward that is missing",
        RETURNS + "None for the completion …",
        "A branch of the function has no return statement.",
        MENDS_REWARD,
        reward=f"{REWARDS}:returns_none",
        exit_code=1,
    ),
    rl_fault(
        "reward for each token",
        RETURNS + "[…",
        "The function returns a list; a completion has one reward.",
        "Return their sum or mean.",
        reward=f"{REWARDS}:returns_many",
        exit_code=1,
    ),
    rl_fault(
        "reward function of other arguments",
        "error: grading failed at …: TypeError: takes_one() takes 1 positional argument but 2 were "
        "given; …",
        "It is called with the completion and the expected answer.",
        "Give the function both parameters.",
        reward=f"{REWARDS}:takes_one",
        exit_code=1,
    ),
    rl_fault(
        "module of rewards that is not there",
        "config error: rl.task.reward_fn names a function to import, got 'no.such:reward': "
        "ModuleNotFoundError: No module named 'no'; …",
        "A typing error, or Python does not look there.",
        "Give the dotted name, and start where Python can find it.",
        reward="no.such:reward",
    ),
    rl_fault(
        "module of rewards that ends the process",
        "config error: rl.task.reward_fn names a function to import, got "
        "'tests.reliability.hostile_module:reward': SystemExit: 0; …",
        "It is a script that runs when it is imported.",
        'Put what it does under `if __name__ == "__main__":`.',
        reward="tests.reliability.hostile_module:reward",
    ),
    rl_fault(
        "reward function that is none",
        "config error: rl.task.reward_fn must name a function, got "
        f"'{REWARDS}:not_a_function', which is a int; correct the name",
        "The name is that of something else.",
        "Name a function.",
        reward=f"{REWARDS}:not_a_function",
    ),
    rl_fault(
        "one completion to compare with itself",
        "config error: rl.advantage.name = 'group_mean' compares completions of one prompt, got "
        "rl.num_samples_per_prompt = 1; set it to 2 or more, or rl.advantage.name to 'none'",
        "The baseline is the mean of a prompt's completions.",
        "Draw several, or take no baseline.",
        "--rl.num_samples_per_prompt=1",
    ),
    rl_fault(
        "temperature that is not a number",
        "config error: rl.sampling.temperature must be above 0, got nan; …",
        "It was computed, and the computation failed.",
        "Give a number above 0.",
        "--rl.sampling.temperature=nan",
    ),
    rl_fault(
        "negative temperature",
        "config error: rl.sampling.temperature must be above 0, got -1.0; …",
        "A typing error.",
        "Give a number above 0.",
        "--rl.sampling.temperature=-1",
    ),
    rl_fault(
        "new weights within a completion, without steps ahead",
        "config error: rl.generator.in_flight updates the weights of a local generator while it draws "
        "beside training, got rl.generator.backend = 'local' and rl.async_steps = 0; set them to "
        "'local' and at least 1, or turn in_flight off",
        "Without steps ahead nothing is drawn while the weights change.",
        "Let generation run ahead, or leave in_flight out.",
        "--rl.generator.in_flight",
    ),
    rl_fault(
        "tool whose schema is none",
        "error: rl.task.tools: the attribute `schema` of …:tool_without_a_name must be a "
        "JSON object like …, got …; correct it, or take it out for one from annotations and docstring",
        "The attribute lacks the function's name, or is no JSON.",
        "Correct the attribute, or take it out.",
        f"--rl.task.tools={REWARDS}:tool_without_a_name",
        "--rl.task.max_turns=2",
        exit_code=1,
    ),
    rl_fault(
        "vLLM that is not installed",
        "error: rl.generator.backend = 'vllm' needs vLLM, which is not installed; install it with "
        "`pip install vllm`, or set the backend to 'local'",
        "vLLM is not a dependency of this package.",
        "Install it, or sample with the trainer's own modules.",
        "--rl.generator.backend=vllm",
    ),
    rl_fault(
        "prompt of another kind",
        "error: …prompts.jsonl, line 2: rl.task.prompt_key = 'prompt' must name a text or a "
        "list of messages in every line, got None; correct the line or the key",
        "The line has no prompt under this key.",
        "Correct the line, or rl.task.prompt_key.",
        prompts='{"prompt": "one"}\n{"question": "two"}\n',
        exit_code=1,
    ),
    rl_fault(
        "prompt that is no text",
        "error: …prompts.jsonl, line 1: not valid JSON: …surrogates not allowed",
        "The text has half of a surrogate pair, which is not a character.",
        "Write the file again with a tool that keeps characters whole.",
        prompts='{"prompt": "\\ud800"}\n',
        exit_code=1,
    ),
]
