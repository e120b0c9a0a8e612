import pytest

from tests.reliability import jobs
from tests.unit.rl.toy import rows_of

pytestmark = pytest.mark.long


def run(folder, *flags):
    return jobs.run(flags, folder / "logs", timeout_seconds=120, module="torchtitan.rl.train")


def test_preset_runs_from_the_command_line(tmp_path):
    outcome = run(
        tmp_path,
        "--job.config_file=torchtitan/rl/train_configs/copy_cpu.toml",
        f"--job.dump_folder={tmp_path}",
        "--training.steps=2",
        "--rl.num_prompts_per_step=2",
        "--rl.eval_samples=4",
        "--metrics.no-enable_tensorboard",
    )
    assert outcome.exit_codes == [0], outcome.output
    assert "step:  2/2" in outcome.output and "training completed" in outcome.output
    rows = rows_of(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 2]
