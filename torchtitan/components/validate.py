"""The reference's path of `torchtitan.listeners.validate`."""
# ruff: noqa: F401

from torchtitan.listeners.validate import (
    BaseValidator,
    ValidationContext,
    Validator,
    build_validator,
)
