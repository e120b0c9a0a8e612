"""The reference's path of `torchtitan.rl`: both paths give the same modules.

`torchtitan.experiments.rl.trainer` is the module `torchtitan.rl.trainer`, and so on.
"""

import importlib
import pkgutil
import sys

import torchtitan.rl

for _info in pkgutil.walk_packages(torchtitan.rl.__path__, "torchtitan.rl."):
    _name, _module = _info.name.removeprefix("torchtitan.rl."), importlib.import_module(_info.name)
    # Python looks in sys.modules first; otherwise it would load the file a second time.
    sys.modules[f"{__name__}.{_name}"] = _module
    if "." not in _name:
        globals()[_name] = _module
