"""Every mistake of a user gets one message that names the key, the value and the remedy."""

import json
import re
import sys
from unittest import mock

import pytest

from torchtitan import train

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("n", "told"), [("8", "8 processes and a product of 3"), ("", "NGPU.*''")])
def test_simulated_ranks_are_checked_like_real_ones(n, told, monkeypatch, capsys):
    flags = ["--comm.mode=fake_backend", "--parallelism.data_parallel_shard_degree=3"]
    monkeypatch.setattr(sys, "argv", ["train", *flags])
    monkeypatch.setenv("NGPU", n)
    with pytest.raises(SystemExit, match="2"):
        train.main(lambda config: pytest.fail("the config went through all checks"))
    assert re.search(told, capsys.readouterr().err)


def test_torchrun_is_told_what_a_rank_with_hidden_output_failed_of(monkeypatch, capsys, tmp_path):
    report = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(report))
    monkeypatch.setattr(sys, "argv", ["train", f"--job.dump_folder={tmp_path}"])

    def fail_with(error):
        with pytest.raises(SystemExit, match="1"):
            train.main(mock.Mock(side_effect=error))
        return json.loads(report.read_text())["message"]["message"] if report.exists() else None

    assert fail_with(ValueError("data.jsonl, line 7")) == "error: data.jsonl, line 7"
    assert "Traceback" in fail_with(KeyError("step"))  # a fault of ours is told with its stack
    report.unlink()
    # The rank that failed tells it.
    assert fail_with(RuntimeError("Connection closed by peer [127.0.0.1]:8938")) is None
