"""Upstream torchtitan's import paths of `torchtitan.rl`: all paths give the same modules.

`torchtitan.experiments.rl.losses` is the module `torchtitan.rl.losses`, and so on. Upstream has the
trainer and the generator in `experiments/rl/actors`; in release 0.2.2, in `experiments/rl/unified/actors`.
"""

import importlib
import pkgutil
import sys

import torchtitan.rl

_FOLDERS = ("", "actors.", "unified.", "unified.actors.")

for _info in pkgutil.walk_packages(torchtitan.rl.__path__, "torchtitan.rl."):
    _name, _module = _info.name.removeprefix("torchtitan.rl."), importlib.import_module(_info.name)
    # Imports look in sys.modules first, so they find the loaded module under every path.
    for _folder in _FOLDERS:
        sys.modules[f"{__name__}.{_folder}{_name}"] = _module
    if "." not in _name:
        globals()[_name] = _module

# `actors` and `unified` have no other content, so both names stand for this package.
actors = unified = sys.modules[__name__]
for _folder in _FOLDERS[1:]:
    sys.modules[f"{__name__}.{_folder}".rstrip(".")] = actors
