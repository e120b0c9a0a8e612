"""A PyTorch-native trainer for large language models.

Importing this package loads only the standard library; its parts are imported where they are used.
"""

from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("torchtitan-embeddable")
except _metadata.PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0.0.0+unknown"
