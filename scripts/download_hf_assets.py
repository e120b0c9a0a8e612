"""Fetch tokenizer, config or weights of a model from the Hugging Face hub.

    python scripts/download_hf_assets.py --repo_id meta-llama/Llama-3.1-8B --assets tokenizer

The files arrive in <local_dir>/<model name>, the folder that `model.hf_assets_path` takes.
Needs huggingface_hub, requests and tqdm (the extra `hub`).
"""

import argparse
import fnmatch
import os
from collections.abc import Iterable

INDEX_PATTERN = "*model.safetensors.index.json"

# Patterns of file names, without their folders.
ASSET_PATTERNS: dict[str, tuple[str, ...]] = {
    "tokenizer": (
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "special_tokens_map.json",
        "vocab.json",
        "vocab.txt",
        "merges.txt",
        "chat_template.jinja",
    ),
    "config": ("config.json", "generation_config.json"),
    "index": (INDEX_PATTERN,),
    "safetensors": (INDEX_PATTERN, "*.safetensors"),
}


def download_hf_assets(
    repo_id: str,
    local_dir: str,
    asset_types: str | list[str],
    download_all: bool = False,
    hf_token: str | None = None,
    additional_patterns: list | None = None,
) -> None:
    """Download files of the hub repository `repo_id` into `<local_dir>/<last part of repo_id>`.

    asset_types: kinds of files, keys of ASSET_PATTERNS. additional_patterns: more file names, in
        which * and ? are wildcards. Both ignore case.
    download_all: fetch every file of the repository.
    A file that the repository lists but does not have is skipped with a message.
    Raises ValueError for a malformed repo_id or an unknown asset type, before the hub is contacted,
    and the hub's or requests' HTTP error if the hub refuses a request.
    """
    from huggingface_hub import hf_hub_download, list_repo_files
    from huggingface_hub.utils import HfHubHTTPError
    from requests.exceptions import HTTPError
    from tqdm import tqdm

    if "/" not in repo_id:
        raise ValueError(
            f"Invalid repo_id format: a repository is owner/name, got {repo_id!r}; "
            f"add its owner, as in meta-llama/Llama-3.1-8B"
        )
    wanted = _patterns_by_type(asset_types, additional_patterns)
    # Since huggingface_hub 1.0 the hub's own error is no longer a subclass of requests' error.
    http_errors = (HTTPError, HfHubHTTPError)
    try:
        listed = list_repo_files(repo_id=repo_id, token=hf_token)
    except http_errors as error:
        if _status(error) == 401:
            print(
                "The hub answers 401: this repository needs a token with access to it. "
                "Give one with --hf_token."
            )
        raise

    files = list(listed) if download_all else _matching_files(repo_id, listed, wanted)
    if not files:
        print(f"Warning: nothing to download from {repo_id}")
        return

    target = os.path.join(local_dir, repo_id.rsplit("/", 1)[-1])
    print(f"Downloading {len(files)} files from {repo_id} to {target}")
    for name in tqdm(files, unit="file"):
        try:
            hf_hub_download(repo_id=repo_id, filename=name, local_dir=target, token=hf_token)
        except http_errors as error:
            if _status(error) != 404:
                raise
            print(f"File {name} not found, skipping...")


def _patterns_by_type(
    asset_types: str | list[str], additional_patterns: list[str] | None
) -> dict[str, Iterable[str]]:
    types = [asset_types] if isinstance(asset_types, str) else asset_types
    for asset_type in types:
        if asset_type not in ASSET_PATTERNS:
            raise ValueError(
                f"Unknown asset type {asset_type}, known are {', '.join(ASSET_PATTERNS)}"
            )
    patterns: dict[str, Iterable[str]] = {name: ASSET_PATTERNS[name] for name in types}
    if additional_patterns:
        patterns["additional_patterns"] = additional_patterns
    return patterns


def _matching_files(
    repo_id: str, listed: Iterable[str], wanted: dict[str, Iterable[str]]
) -> list[str]:
    """Return the files that a pattern matches, in the order of the listing."""
    listed = list(listed)
    chosen = set()
    for asset_type, patterns in wanted.items():
        found = {name for name in listed if _matches(name, patterns)}
        if not found:
            print(f"Warning: No matching files found for asset_type '{asset_type}' in {repo_id}")
        chosen |= found
    return [name for name in listed if name in chosen]


def _matches(repo_file: str, patterns: Iterable[str]) -> bool:
    base_name = repo_file.rsplit("/", 1)[-1].lower()
    return any(fnmatch.fnmatchcase(base_name, pattern.lower()) for pattern in patterns)


def _status(error: Exception) -> int | None:
    # Compared with None, because a response with an error status is falsy.
    response = getattr(error, "response", None)
    return None if response is None else response.status_code


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Fetch tokenizer, config or weights of a model from the Hugging Face hub."
    )
    parser.add_argument("--repo_id", required=True, help="owner/name, as on the hub")
    parser.add_argument("--hf_token", help="access token, for repositories that ask for one")
    parser.add_argument(
        "--local_dir", default="assets/hf/", help="folder for a new folder with the files"
    )
    parser.add_argument(
        "--assets", nargs="+", default=[], help=f"kinds of files: {', '.join(ASSET_PATTERNS)}"
    )
    parser.add_argument(
        "--additional_patterns", nargs="+", default=[], help="more file names, * and ? allowed"
    )
    parser.add_argument("--all", action="store_true", help="fetch every file there is")
    args = parser.parse_args()
    if not (args.assets or args.additional_patterns or args.all):
        parser.error("nothing to fetch: give --assets, --additional_patterns or --all")

    download_hf_assets(
        repo_id=args.repo_id,
        local_dir=args.local_dir,
        asset_types=args.assets,
        download_all=args.all,
        hf_token=args.hf_token,
        additional_patterns=args.additional_patterns,
    )


if __name__ == "__main__":
    main()
