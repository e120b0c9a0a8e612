"""JSON from files that come from elsewhere."""

import json
import os
from typing import Any

from torchtitan.tools.files import open_file

_MOST_BYTES = 2**28  # vocabularies and indexes have some 10 MB


def read_json_object(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the JSON object in `path`.

    Raises ValueError, without the file's name, if the file holds anything else, is nested too
    deeply or is larger than 256 MiB; OSError if it cannot be opened.
    """
    if (size := os.path.getsize(path)) > _MOST_BYTES:
        raise ValueError(f"it has {size} bytes, and at most {_MOST_BYTES} are read")
    with open_file(path, encoding="utf-8") as file:
        try:
            content = json.load(file)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None
    if not isinstance(content, dict):
        raise ValueError(f"it must hold a JSON object, got a {type(content).__name__}")
    return content
