"""Every shipped TOML file is a job that passes the checks, and the examples fit together."""

from pathlib import Path

import pytest

from torchtitan.config import ConfigManager
from torchtitan.experiments.rl_toy.examples import SolvedExamples
from torchtitan.job import resolve_job
from torchtitan.rl.checks import check_rl_config
from torchtitan.rl.job_config import JobConfig

CONFIGS = Path("torchtitan/rl/train_configs")


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_preset_is_a_job_that_can_start(path, tmp_path):
    config = ConfigManager(JobConfig).parse_args(
        [f"--job.config_file={path}", f"--job.dump_folder={tmp_path}"]
    )
    config.checkpoint.initial_load_path = None  # made by the pre-training run
    resolve_job(config)
    if not path.stem.endswith("pretrain"):
        check_rl_config(config)


def test_rl_starts_from_where_pretraining_ends():
    pretraining, rl = (
        ConfigManager(JobConfig).parse_args([f"--job.config_file={CONFIGS / name}"])
        for name in ("sum_digits_pretrain.toml", "sum_digits_cpu.toml")
    )
    step = pretraining.training.steps
    assert rl.checkpoint.initial_load_path == (
        f"{pretraining.job.dump_folder}/checkpoint/step-{step}"
    )
    assert f"step-{step}" in Path("scripts/run_rl.sh").read_text()


def test_solved_examples_are_the_same_rows_on_any_number_of_ranks(tmp_path):
    config = ConfigManager(JobConfig).parse_args(
        [
            f"--job.config_file={CONFIGS / 'sum_digits_pretrain.toml'}",
            "--training.local_batch_size=2",
        ]
    )

    def rows(world_size, rank, n_batches):
        loader = SolvedExamples(config, world_size, rank)
        batches = iter(loader)
        found = [next(batches) for _ in range(n_batches)]
        return [row for batch, labels in found for row in zip(batch["input"], labels, strict=True)]

    alone = rows(1, 0, 4)
    first, second = rows(2, 0, 2), rows(2, 1, 2)
    dealt = first[:2] + second[:2] + first[2:] + second[2:]
    for (tokens, labels), (other, other_labels) in zip(alone, dealt, strict=True):
        assert tokens.equal(other) and labels.equal(other_labels)

    task = SolvedExamples(config, 1, 0).task
    tokens, labels = alone[0]
    prompt = task.prompt(0)
    n = len(prompt.token_ids)
    assert tokens[:n].tolist() == list(prompt.token_ids)
    answer = [*task.tokenizer.encode(prompt.answer), task.tokenizer.eos_id]
    assert labels[labels >= 0].tolist() == answer
    assert (labels >= 0).nonzero()[0].item() == n - 1, "the prompt's last token predicts the first"
