"""The small tokenizer and dataset of the default job, found from any working folder."""

from pathlib import Path

_ASSETS = Path(__file__).parents[1] / "assets"


def find_shipped(path: str) -> str:
    """Return `path`, or the package's copy of tests/assets/NAME if `path` is that and is missing."""
    given = Path(path)
    copy = _ASSETS / given.name
    is_default = given.parent == Path("tests/assets") and copy.is_dir()
    return str(copy) if is_default and not given.exists() else path
