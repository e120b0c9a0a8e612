"""The certificate of isolation is worth something: it catches what it is there to catch."""

import pytest
import torch

from tests.isolation import certificate as isolation
from tests.isolation.certificate import Certificate, Subject, attend_dense, certify
from tests.isolation.faults import FAULTS, packings_until_caught
from tests.isolation.packings import row_length


def test_there_are_at_least_twenty_faults():
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught_within_sixty_packings(name):
    assert packings_until_caught(FAULTS[name], max_packings=60) is not None


def test_nothing_is_wrong_with_what_the_faults_are_made_from():
    assert packings_until_caught(Subject, max_packings=10) is None


def test_failing_packing_is_shrunk_to_two_documents_of_one_row():
    certificate = Certificate(FAULTS["mask argument dropped"]())
    failed = certify(certificate, 20)
    smallest = certificate.shrink(failed)
    assert len(smallest.packing) == 1 and row_length(smallest.packing) == 2
    assert certificate.check(smallest)


def test_kernel_that_raises_is_a_failure():
    def broken(q, k, v, document_ids):
        raise NotImplementedError("no such kernel")

    certificate = Certificate(Subject(kernels={"broken": broken}))
    certify(certificate, 1)
    assert "NotImplementedError: no such kernel" in certificate.tally.failures[0]


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_nan_in_one_gradient_is_a_failure(where):
    def with_nan(q, k, v, document_ids):
        q, k, v = (x.clone() for x in (q, k, v))
        {"q": q, "k": k, "v": v}[where].register_hook(lambda grad: grad * torch.nan)
        return attend_dense(q, k, v, document_ids)

    certificate = Certificate(Subject(kernels={"nan": with_nan}))
    certify(certificate, 1)
    assert "nan" in certificate.tally.failures[0]


def test_command_reports_a_failure_with_its_smallest_packing(monkeypatch, capsys):
    broken = FAULTS["mask argument dropped"]()
    monkeypatch.setattr(isolation, "CPU_KERNELS", broken.kernels)
    assert isolation.main(["--packings=20"]) == 1
    printed = capsys.readouterr().out
    assert "row 0: 1 from position" in printed
    assert "errors output" in printed


def test_command_succeeds_where_nothing_fails(capsys):
    assert isolation.main(["--packings=3"]) == 0
    printed = capsys.readouterr().out
    assert "3 packings" in printed and "0 failures" in printed
