"""The two sets of tested versions agree."""

import re
import tomllib
from pathlib import Path

import pytest


@pytest.mark.parametrize("name", ["constraints.txt", "constraints-verl.txt"])
def test_the_constraints_are_versions_of_the_lock(name):
    locked = {
        (p["name"], p.get("version")) for p in tomllib.loads(Path("uv.lock").read_text())["package"]
    }
    pinned = re.findall(r"^([\w.-]+)==(\S+)$", Path(name).read_text(), re.M)
    assert len(pinned) > 20
    assert {(n.lower().replace("_", "-"), version) for n, version in pinned} <= locked
