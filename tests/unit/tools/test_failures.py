"""The last message of a run that fails, and failures that are not bugs of this program."""

import errno
import io
import os
import resource
import sys
import warnings
from functools import partial

import pytest
import torch

from torchtitan.config import JobConfig
from torchtitan.tools.errors import ConfigError, RunError, allow_open_files, as_run_error
from torchtitan.tools.logging import init_logger, logger
from torchtitan.train import _quiet_libraries, _report_failure


def hook(*_):
    raise KeyError("no such thing")


class Peers:
    def report(self, message):
        print(f"the others say: {message}", file=sys.stderr)


@pytest.mark.parametrize("excepthook", [sys.__excepthook__, hook], ids=["python's", "broken"])
def test_sentence_comes_below_the_stack_of_a_bug_and_before_what_other_ranks_say(
    excepthook, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "excepthook", excepthook)
    try:
        hook()
    except KeyError as error:
        assert _report_failure(error, JobConfig(), Peers()) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-3] == "error: KeyError: 'no such thing'"
    assert lines[-2].startswith(f"(found at {__file__}:")
    assert lines[-1] == "the others say: KeyError: 'no such thing'"
    assert "Traceback (most recent call last):" in lines[:-3]


@pytest.mark.parametrize(
    ("error", "code", "hint"),
    [
        (ConfigError("set it to 3"), 2, []),
        (RunError("mend that"), 1, ["(TORCHTITAN_TRACEBACK=1 shows the stack)"]),
    ],
)
def test_sentence_stands_without_the_place_in_this_code_that_found_it(error, code, hint, capsys):
    assert _report_failure(error, JobConfig(), None) == code
    assert capsys.readouterr().err.splitlines() == [f"error: {error}", *hint]


def test_program_leaves_out_warnings_of_torch_about_what_is_meant(monkeypatch):
    monkeypatch.delenv("HF_DATASETS_DISABLE_PROGRESS_BARS", raising=False)
    torch.set_warn_always(True)
    norm = partial(torch.rms_norm, torch.ones(2, 4).bfloat16(), (4,), torch.ones(4))
    try:
        with pytest.warns(UserWarning, match="Mismatch dtype"):
            norm()
        with warnings.catch_warnings(record=True) as caught:
            _quiet_libraries()
            norm()
            warnings.warn("of the user's own", UserWarning, stacklevel=1)
    finally:
        torch.set_warn_always(False)
    assert [str(warning.message) for warning in caught] == ["of the user's own"]
    assert os.environ.pop("HF_DATASETS_DISABLE_PROGRESS_BARS") == "1"  # not in a terminal


IN_SHARED_MEMORY = (
    "unable to open shared memory object </t> in read-write mode: Too many open files (24)"
)


@pytest.mark.parametrize(
    "error", [OSError(errno.EMFILE, "Too many open files", "/run"), RuntimeError(IN_SHARED_MEMORY)]
)
def test_too_many_open_files_are_told_with_the_limit(error):
    told = as_run_error(error, JobConfig())
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert isinstance(told, RunError)
    assert f"too many open files: {limit} are allowed to this process (ulimit -n)" in str(told)


def test_limit_of_open_files_is_raised_as_far_as_it_may_be(monkeypatch):
    limits = [(20, 1024)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.append(new))
    allow_open_files()
    assert limits[-1] == (1024, 1024)
    limits.append((100, 100))
    with pytest.raises(RunError, match="100 are allowed to this process .*at least 128 are needed"):
        allow_open_files()


def test_log_is_readable_on_a_terminal_that_takes_ascii_only(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    init_logger()
    logger.info("größe")
    assert written.getvalue().endswith(rb" gr\xf6\xdfe" + b"\n")
