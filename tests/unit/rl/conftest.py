import sys

import pytest


@pytest.fixture(scope="session", autouse=True)
def no_actor_libraries():
    """Make imports of libraries that RL does not need fail: None in sys.modules raises ImportError."""
    blocked = ["ray", "monarch", "torchstore", "vllm"]
    before = {name: sys.modules.get(name) for name in blocked}
    sys.modules.update(dict.fromkeys(blocked))
    yield
    for name, module in before.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
