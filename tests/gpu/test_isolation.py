"""The certificate of isolation on the compiled kernels."""

from tests.isolation.certificate import (
    ACCELERATOR_KERNELS,
    ACCELERATOR_SHAPES,
    Certificate,
    Subject,
    certify,
)
from tests.isolation.test_certificate import boundaries_a_token_late


def test_fifty_packings_are_isolated_within_the_rounding_of_bf16():
    certificate = Certificate(Subject(kernels=ACCELERATOR_KERNELS), ACCELERATOR_SHAPES)
    assert certify(certificate, 50) is None, certificate.tally.failures


def test_boundaries_a_token_late_stand_out_from_the_rounding_of_bf16():
    subject = Subject(document_ids=boundaries_a_token_late, kernels=ACCELERATOR_KERNELS)
    assert certify(Certificate(subject, ACCELERATOR_SHAPES), 20) is not None
