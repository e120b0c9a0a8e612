"""The name that the reference has for `torchtitan.rl`; its modules can be imported from here too.

`torchtitan.experiments.rl.types` is the very module `torchtitan.rl.types`, not a second copy
whose classes would be others.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_ALIAS, _REAL = f"{__name__}.", "torchtitan.rl."


class _AliasFinder(MetaPathFinder, Loader):
    """Finds a module under the alias by importing the real one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.startswith(_ALIAS) else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_REAL + spec.name.removeprefix(_ALIAS))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # It ran already. Importing put the alias's spec into it: give it its own back.
        module.__spec__ = module.__spec__.loader_state


# Before the finder of files, which would look where the real package lies.
sys.meta_path.insert(0, _AliasFinder())
