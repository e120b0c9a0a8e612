"""`torchtitan preflight` passes a good machine, and names the rank and host of a faulty one."""

import re
import socket

import pytest
import torch

from tests.reliability import jobs

HOST = socket.gethostname()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("preflight")
    arguments = [f"--job.dump_folder={folder}/run", f"--model.hf_assets_path={jobs.TOKENIZER}"]
    return jobs.run(
        arguments, folder / "logs", 120, module="tests.reliability.faulty_preflight", ranks=3
    )


def told(outcome, fault, rank=0):
    return outcome.outputs[rank].partition(f"== {fault}\n")[2].partition("\n==")[0]


def test_good_machine_passes_with_its_figures(outcome):
    lines = told(outcome, "good").splitlines()
    checks = ["device", "disk", "shared_folder", "clock", "pairs", "all_reduce"]
    assert [line.split()[:2] for line in lines[:6]] == [["ok", check] for check in checks]
    for text in ("GiB free", "GB/s inside hosts", "GB/s of each link", "s from rank 0's"):
        assert text in told(outcome, "good")
    assert re.fullmatch(r"preflight: nothing failed; 3 ranks on 1 hosts, \d+\.\d s", lines[6])
    assert [told(outcome, "good", rank) for rank in (1, 2)] == ["passed", "passed"]


@pytest.mark.parametrize(
    ("fault", "check", "text"),
    [
        ("slow pair", "pairs", f"rank 1 ({HOST}): 0.0"),
        ("clock", "clock", f"rank 1 ({HOST}): 90.0 s behind rank 0's clock; start chrony"),
        ("full disk", "disk", f"rank 1 ({HOST}): [Errno 28] No space left on device; make room"),
        ("folder that is not shared", "shared_folder", f"rank 1 ({HOST}): "),
    ],
)
def test_fault_is_told_in_one_line_with_its_rank_and_fails_all_ranks(outcome, fault, check, text):
    output = told(outcome, fault)
    lines = output.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("FAIL")] == [check], output
    (line,) = (line for line in lines if line.startswith(f"      {text}"))
    assert f"preflight: {check} failed" in output
    assert [told(outcome, fault, rank).splitlines()[-1] for rank in range(3)] == ["failed"] * 3


def test_other_version_of_a_rank_is_told(outcome):
    text = f"version of.torch is '{torch.__version__}' on rank 0 and '2.9.0' on rank 1"
    assert text in told(outcome, "other version")
    assert told(outcome, "other version", 1).endswith("ranks differ")


def test_stuck_rank_is_named_with_its_stack_and_all_ranks_end(outcome):
    assert outcome.exit_codes == [1, 1, 1] and outcome.seconds < 60, outcome.output
    output = told(outcome, "stuck")
    assert re.search(
        rf"rank 1 \({HOST}\) has kept the others waiting for at least \d s, at "
        r"reliability/faulty_preflight.py:\d+ \(<lambda>\); its calls, innermost first:\n",
        output,
    ), outcome.output
