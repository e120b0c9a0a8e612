"""`torchtitan preflight` passes a good machine, and names the host and rank of a bad one."""

import socket

import pytest
import torch

from tests.reliability import jobs

HOST = socket.gethostname()


def preflight(folder, fault="", ranks=2, flags=(), own_folder_of_rank_1=False):
    own = {1: [f"--job.dump_folder={folder}/own"]} if own_folder_of_rank_1 else {}
    outcome = jobs.run(
        [f"--job.dump_folder={folder}/run", f"--model.hf_assets_path={jobs.TOKENIZER}", *flags],
        folder / "logs",
        120,
        module="tests.reliability.faulty_preflight",
        ranks=ranks,
        environment={"FAULT": fault},
        arguments_of_rank=own,
    )
    assert "Traceback" not in outcome.output, outcome.output
    assert not [path for path in folder.rglob(".preflight*") if fault != "absent"]
    return outcome


def failed_checks(outcome):
    lines = outcome.outputs[0].splitlines()
    return [line.split()[1] for line in lines if line.startswith("FAIL")]


def test_good_machine_passes_with_its_figures(tmp_path):
    outcome = preflight(tmp_path, ranks=3, flags=["--checkpoint.enable"])
    assert outcome.exit_codes == [0, 0, 0], outcome.output
    lines = outcome.outputs[0].splitlines()
    checks = "ranks equal device disk shared connect clock pairs all-reduce".split()
    assert [line.split()[:2] for line in lines[:-1]] == [["ok", check] for check in checks]
    for text in (f"3 on {HOST}", "GiB free", "GB/s inside hosts", "bus bandwidth over 3 ranks"):
        assert text in outcome.outputs[0]
    assert lines[-1].startswith("preflight: no check(s) failed")
    assert outcome.outputs[1:] == ["", ""]


FAULTS = {  # fault -> the check that fails, and what is said
    "slow pair": ("pairs", f"ranks 1, 2 ({HOST}): 0.01"),
    "clock": ("clock", f"rank 1 ({HOST}): 90.0 s behind the median"),
    "versions": (
        "equal",
        f"torch is '{torch.__version__}' on rank 0 ({HOST}) and '2.9.0' on rank 1 ({HOST})",
    ),
    "full disk": (
        "disk",
        f"rank 1 ({HOST}): FOLDER/run cannot be written: No space left on device",
    ),
    "stuck": ("all-reduce", f"no answer within 5 s; rank 1 ({HOST}) kept the others waiting"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faulty_rank_fails_its_check_on_all_ranks(fault, tmp_path):
    check, text = FAULTS[fault]
    outcome = preflight(tmp_path, fault, ranks=3)
    assert outcome.exit_codes == [1, 1, 1], outcome.output
    assert failed_checks(outcome) == [check], outcome.output
    assert text.replace("FOLDER", str(tmp_path)) in outcome.outputs[0], outcome.output
    assert outcome.seconds < 60


def test_rank_that_never_arrives_is_named_and_the_others_are_checked(tmp_path):
    outcome = preflight(tmp_path, "absent", ranks=3)
    assert outcome.exit_codes == [1, 1, 0], outcome.output
    assert failed_checks(outcome) == ["ranks"]
    assert "rank 2 of 3 did not come in 6 s" in outcome.outputs[0]
    assert "bus bandwidth over 2 ranks" in outcome.outputs[0]


def test_folder_that_is_not_shared_fails_only_if_checkpoints_need_it(tmp_path):
    outcome = preflight(tmp_path, own_folder_of_rank_1=True, flags=["--checkpoint.enable"])
    assert outcome.exit_codes == [1, 1] and failed_checks(outcome) == ["shared"]
    said = f"rank 1 ({HOST}): the folder of checkpoints is not that of rank 0"
    assert said in outcome.outputs[0]
    outcome = preflight(tmp_path, own_folder_of_rank_1=True)
    assert outcome.exit_codes == [0, 0], outcome.output
    assert "not shared, and not needed without checkpoint.enable" in outcome.outputs[0]


def test_config_that_differs_is_told_with_the_key(tmp_path):
    flags = ["--training.steps=5"]
    outcome = jobs.run(
        [f"--job.dump_folder={tmp_path}/run"],
        tmp_path / "logs",
        120,
        module="torchtitan.commands.preflight",
        ranks=2,
        arguments_of_rank={1: flags},
    )
    assert outcome.exit_codes == [1, 1] and failed_checks(outcome) == ["equal"]
    said = f"training.steps is 10000 on rank 0 ({HOST}) and 5 on rank 1 ({HOST})"
    assert said in outcome.outputs[0]
