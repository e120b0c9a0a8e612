"""Every fault of the fault book is brought about, and is told as the book says."""

import pytest

from tests.reliability.faults import (
    CHAPTERS,
    LIMIT_SECONDS,
    bring_about,
    chapter,
    finish_a_run,
    says,
)
from tests.reliability.faults.__main__ import entries, find, title_of

FAULTS = {title_of(module, fault): fault for module in CHAPTERS for fault in chapter(module)}
MOST_LINES = 60  # of log and message together


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    return finish_a_run(tmp_path_factory.mktemp("finished_run"))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_told(name, finished_run, tmp_path):
    fault = FAULTS[name]
    outcome = bring_about(fault, tmp_path, finished_run)
    expected = fault.exit_code
    expected = list(expected) if isinstance(expected, tuple) else [expected] * fault.ranks
    assert outcome.exit_codes == expected, outcome.output
    assert says(outcome.output, fault.message), outcome.output
    for text in ("Traceback (most recent call last)", *fault.absent):
        assert text not in outcome.output, outcome.output
    assert max(output.count("\n") for output in outcome.outputs) <= MOST_LINES, outcome.output
    assert outcome.seconds < LIMIT_SECONDS
    if fault.check is not None:
        fault.check(tmp_path)


def test_names_are_told_apart():
    assert len(FAULTS) == sum(len(chapter(module)) for module in CHAPTERS)


def test_fault_is_found_by_its_name_its_message_and_a_line_of_a_log():
    assert len(find("")) == len(entries()) == len(FAULTS)
    for title, (message, text) in entries().items():
        assert text in find(FAULTS[title].name)
        assert text in find("12:34:56 [titan] " + message.replace("…", "anything"))
        assert "As above" not in text
