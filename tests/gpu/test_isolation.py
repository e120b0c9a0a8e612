"""The certificate of isolation on the compiled kernels."""

from dataclasses import replace

import pytest

from tests.isolation.certificate import (
    ACCELERATOR_KERNELS,
    ACCELERATOR_SHAPES,
    Certificate,
    Subject,
    certify,
)
from tests.isolation.faults import FAULTS


def test_fifty_packings_are_isolated_within_the_rounding_of_bf16():
    certificate = Certificate(Subject(kernels=ACCELERATOR_KERNELS), ACCELERATOR_SHAPES)
    assert certify(certificate, 50) is None, certificate.tally.failures


@pytest.mark.parametrize(
    "name",
    [
        "boundaries a token too late",
        "boundaries of another row",
        "the last document joins the one before",
    ],
)
def test_faults_stand_out_from_the_rounding_of_bf16(name):
    subject = replace(FAULTS[name](), kernels=ACCELERATOR_KERNELS)
    assert certify(Certificate(subject, ACCELERATOR_SHAPES), 20) is not None
