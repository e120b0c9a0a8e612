"""A PyTorch-native trainer for large language models.

Importing this package loads nothing but the standard library; every part is imported where
it is used.
"""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("torchtitan-embeddable")
except _metadata.PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0.0.0+unknown"
