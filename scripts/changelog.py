#!/usr/bin/env python
"""Move the fragments of changelog.d into CHANGELOG.md, as the list of a version.

python scripts/changelog.py 0.2.101
"""

import argparse
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def release(version: str, root: Path = ROOT) -> None:
    """Add the version's list above the earlier ones, and delete the fragments."""
    fragments = sorted((root / "changelog.d").glob("*.md"))
    if not fragments:
        raise SystemExit("changelog.d has no fragments; there is nothing to release")
    texts = [" ".join(fragment.read_text().split()) for fragment in fragments]
    page = root / "CHANGELOG.md"
    head, mark, earlier = page.read_text().partition("\n## ")
    items = "".join(f"- {text}\n" for text in texts)
    page.write_text(f"{head}\n## {version}\n\n{items}{mark}{earlier}")
    for fragment in fragments:
        fragment.unlink()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("version")
    release(parser.parse_args().version)
