"""The certificate of isolation on the compiled kernels."""

from tests.isolation.test_isolation import boundaries_a_token_late, problems_of
from torchtitan.testing import isolation


def test_fifty_packings_are_isolated_within_the_rounding_of_bf16():
    assert problems_of(50, "cuda") == []


def test_boundaries_a_token_late_stand_out_from_the_rounding_of_bf16(monkeypatch):
    monkeypatch.setattr(isolation, "read_document_ids", boundaries_a_token_late)
    assert problems_of(20, "cuda")
