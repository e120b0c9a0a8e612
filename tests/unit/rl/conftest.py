import contextlib
import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_actor_libraries():
    """Make imports of libraries that RL does not need fail: None in sys.modules raises ImportError."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ray", "monarch", "torchstore", "vllm"):
            patch.setitem(sys.modules, name, None)
        yield


@pytest.fixture
def start(tmp_path):
    """Return a function that builds and sets up the controller of a toy job; all are closed at the end."""
    from tests.unit.rl.toy import toy_config
    from torchtitan.rl.controller import Controller

    with contextlib.ExitStack() as stack:

        def start(*flags, folder=tmp_path):
            controller = Controller(toy_config(folder, *flags))
            stack.callback(controller.close)
            controller.setup()
            return controller

        yield start
