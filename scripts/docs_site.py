"""mkdocs hooks: the site shows the Markdown files at the root, too, and the files that pages link to.

The pages are written to be read in the repository, where `docs/rl.md` links to `../README.md`. mkdocs
knows only the files below `docs/`. Here README.md becomes the site's index.md, CHANGELOG.md and
CONTRIBUTING.md become pages, linked files such as examples are copied, and links are adapted.
"""

import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
PAGES_AT_ROOT = {"README.md": "index.md", "CHANGELOG.md": "CHANGELOG.md"}
PAGES_AT_ROOT["CONTRIBUTING.md"] = "CONTRIBUTING.md"
_LINK = re.compile(r"(\]\()(?!https?:|#)([^)#\s]+)")
_sources = {page: source for source, page in PAGES_AT_ROOT.items()}


def _path_in_site(page: str, link: str) -> str:
    """The site's path of the file that `link`, on the page of this path in the site, leads to."""
    folder = PurePosixPath(_sources.get(page, f"docs/{page}")).parent
    path = os.path.normpath(folder / link)
    return PAGES_AT_ROOT.get(path, path.removeprefix("docs/"))


def on_files(files: Any, config: Any) -> Any:
    for source, page in PAGES_AT_ROOT.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    for page in [file for file in files if file.src_path.endswith(".md")]:
        for _, link in _LINK.findall(page.content_string):
            path = _path_in_site(page.src_path, link)
            if files.get_file_from_path(path) is None and (ROOT / path).is_file():
                files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    own = page.file.src_path

    def adapted(match: re.Match[str]) -> str:
        return match[1] + os.path.relpath(_path_in_site(own, match[2]), PurePosixPath(own).parent)

    return _LINK.sub(adapted, markdown)
