"""Counting waits for the device, with warnings like those that CUDA gives."""

import warnings

import torch

from tests.gpu.waits import counting_waits


def read_value() -> None:
    warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)


def test_waits_are_counted_by_place_and_other_warnings_are_not(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    show = warnings.showwarning
    with counting_waits() as waits:
        for _ in range(3):
            read_value()
        warnings.warn("a prototype that does not detect all synchronizing operations", stacklevel=1)
    assert waits == {"tests/unit/repository/test_waits.py read_value": 3}
    assert modes == ["warn", "default"] and warnings.showwarning is show
