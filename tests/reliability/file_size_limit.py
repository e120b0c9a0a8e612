"""For `experimental.custom_import`: ranks named in LIMITED_RANKS write no file above 100 kB.

The operating system then refuses as it does under `ulimit -f`, for any user.
"""

import os
import resource

import tests.reliability.tiny_flavor  # noqa: F401

BYTES = 10**5

if os.environ.get("RANK", "0") in os.environ["LIMITED_RANKS"].split(","):
    resource.setrlimit(resource.RLIMIT_FSIZE, (BYTES, resource.RLIM_INFINITY))
