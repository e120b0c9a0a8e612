"""The plug-in for verl, with stand-ins for verl's modules; tests/verl has the real ones."""

import runpy
import sys
from types import ModuleType

import pytest

from torchtitan.tools.logging import logger

PLUGIN = "torchtitan.integrations.verl.plugin"


@pytest.fixture
def add_module(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return lambda name: monkeypatch.setitem(sys.modules, name, ModuleType(name))


def test_verl_without_a_torchtitan_config_is_left_alone(add_module):
    add_module("verl.workers.config")
    runpy.run_module(PLUGIN)


def test_plugin_that_fails_is_told_because_verl_does_not(add_module, monkeypatch):
    told = []
    monkeypatch.setattr(logger, "error", lambda text, *values: told.append(text % values))
    for name in ("verl", "verl.workers.engine", "torchtitan.integrations.verl.engine"):
        add_module(name)
    sys.modules["verl"].__version__ = "0.1"
    with pytest.raises(ImportError):
        runpy.run_module(PLUGIN)
    (sentence,) = told
    assert "cannot import name" in sentence and "found 0.1: install" in sentence
