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

    def fails(error):
        return mock.Mock(side_effect=error)

    with pytest.raises(SystemExit):
        train.main(fails(ValueError("data.jsonl, line 7")))
    assert json.loads(report.read_text())["message"]["message"] == "error: data.jsonl, line 7"
    with pytest.raises(SystemExit):  # a fault of ours is told with its stack
        train.main(fails(KeyError("step")))
    assert "Traceback" in json.loads(report.read_text())["message"]["message"]
    report.unlink()
    with pytest.raises(SystemExit, match="1"):  # that rank tells it
        train.main(fails(RuntimeError("Connection closed by peer [127.0.0.1]:8938")))
    assert not report.exists()
