"""The entry point that verl imports in every process, at the end of `import verl`.

verl imports entry points of the group `verl.plugins` and calls no function in them, so this module acts
on import. It registers engines only when verl's own engines are imported, because importing engines
takes seconds, and many of verl's processes need none.
"""

import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType

from torchtitan.tools.logging import logger


def register_engines(workers_engine: ModuleType) -> None:
    """Register our engines as verl's "torchtitan" backend, on CPU and CUDA."""
    # Imported here because `engine` needs `workers_engine`, which has just been imported.
    from torchtitan.integrations.verl.engine import LanguageModelEngine, ValueModelEngine

    for engine in (LanguageModelEngine, ValueModelEngine):
        register = workers_engine.EngineRegistry.register
        register(engine.model_type, "torchtitan", device=["cpu", "cuda"])(engine)


_actions: dict[str, Callable[[ModuleType], None]] = {}


def after_import(name: str, act: Callable[[ModuleType], None]) -> None:
    """Call `act` with the module `name`: now if the module is imported already, else after its import."""
    if name in sys.modules:
        act(sys.modules[name])
    else:
        _actions[name] = act


class _AfterImport(importlib.abc.MetaPathFinder):
    """An import finder that runs the actions of `after_import`, each after the import of its module.

    Python has no hook after an import, so the finder wraps the loader's `exec_module`.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        act = _actions.pop(name, None)
        spec = None if act is None else importlib.machinery.PathFinder.find_spec(name, path)
        if act is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            with warnings.catch_warnings():
                # verl warns that its own torchtitan engine is unavailable; our engine replaces it.
                warnings.filterwarnings("ignore", "torchtitan engine is not available")
                execute(module)
            act(module)

        spec.loader.exec_module = execute_and_act
        return spec


try:
    sys.meta_path.insert(0, _AfterImport())
    after_import("verl.workers.engine", register_engines)
except Exception as error:
    # verl ignores plug-ins that fail, and logs the failure only at level DEBUG.
    logger.error(
        "verl cannot use torchtitan, because torchtitan's plug-in failed (%s: %s); it was made for "
        "verl 0.9.1 and found %s: install that version, or turn plug-ins off with "
        "VERL_USE_EXTERNAL_PLUGINS=none",
        type(error).__name__,
        error,
        getattr(sys.modules.get("verl"), "__version__", None),
    )
    raise
