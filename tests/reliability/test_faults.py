"""Every fault of the fault book is brought about, and is told as the book says."""

import re

import pytest

from tests.reliability.faults import (
    LIMIT_SECONDS,
    bring_about,
    faults,
    finish_a_run,
    read_book,
    says,
)
from tests.reliability.faults.__main__ import find

BOOK = {row.title: row for row in read_book()}
FAULTS = faults()
MOST_LINES = 60  # of log and message together
# torch's signal handler raises for a dead data worker. If that happens inside a callback of Python's,
# Python prints the error with its stack and goes on; the loader notices the worker's death later.
_PRINTED_BY_PYTHON = re.compile(
    r"^Exception ignored in: .*\nTraceback \(most recent call last\):\n(?:  .*\n)*\S.*\n",
    re.MULTILINE,
)


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory):
    return finish_a_run(tmp_path_factory.mktemp("finished_run"))


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_told(name, finished_run, tmp_path):
    fault, row = FAULTS[name], BOOK[name]
    outcome = bring_about(fault, tmp_path, finished_run)
    each = len(row.exit_codes) > 1
    assert outcome.exit_codes == list(row.exit_codes) * (1 if each else fault.ranks), outcome.output
    assert says(outcome.output, row.message), outcome.output
    own_output = _PRINTED_BY_PYTHON.sub("", outcome.output)
    for text in ("Traceback (most recent call last)", *fault.absent):
        assert text not in own_output, outcome.output
    assert max(output.count("\n") for output in outcome.outputs) <= MOST_LINES, outcome.output
    assert outcome.seconds < LIMIT_SECONDS
    if fault.check is not None:
        fault.check(tmp_path)


def test_every_row_of_the_book_is_brought_about():
    assert FAULTS.keys() == BOOK.keys() and len(BOOK) == len(read_book())


def test_fault_is_found_by_its_name_its_message_and_a_line_of_a_log():
    for row in read_book()[::20]:
        line_of_log = "12:34:56 [titan] " + row.message.replace("…", "anything")
        assert row in find(row.name) and row in find(line_of_log)
