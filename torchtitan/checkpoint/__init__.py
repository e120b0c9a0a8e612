"""Saving and loading a run; `manager.CheckpointManager` is the way in.

`selection` says which checkpoint is loaded, `retention` which ones are kept, `states` what goes
into one, `staging` how it is copied while training goes on, `folder` what a step folder is on
disk; `dcp` and `hf` read and write the two formats, `stream` hands the weights to a server.
"""

from torchtitan.tools.lazy_names import load_on_access

# Loads DCP, which takes a second to import, and which programs that only receive weights don't need.
__getattr__ = load_on_access(__name__, {"ModelWrapper": ".states"})
