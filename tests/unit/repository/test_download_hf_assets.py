"""The files that the script requests from a fake hub."""

import sys
from types import SimpleNamespace
from unittest import mock

import pytest

pytest.importorskip("huggingface_hub")
pytest.importorskip("tqdm")
HTTPError = pytest.importorskip("requests.exceptions").HTTPError

from scripts.download_hf_assets import download_hf_assets, main  # noqa: E402

REPO = "meta-llama/Llama-3.1-8B"
TOKENIZER = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"]
TOKENIZER += ["original/tokenizer.model", "chat_template.jinja"]
CONFIG = ["config.json", "generation_config.json"]
INDEX = ["model.safetensors.index.json"]
SAFETENSORS = [f"model-0000{i}-of-00004.safetensors" for i in range(1, 5)] + INDEX
OTHERS = ["README.md", "LICENSE", "USE_POLICY.txt", "original/consolidated.00.pth"]
ALL = TOKENIZER + CONFIG + SAFETENSORS + OTHERS


@pytest.fixture
def hub(tmp_path):
    """A hub with the files of Llama 3.1 8B, and a chat template; call it to download, and get the file names."""
    with (
        mock.patch("huggingface_hub.list_repo_files", return_value=ALL) as listing,
        mock.patch("huggingface_hub.hf_hub_download") as download,
    ):

        def fetch(asset_types, **options) -> list[str]:
            download_hf_assets(REPO, str(tmp_path), asset_types, **options)
            calls = [call.kwargs for call in download.call_args_list]
            for call in calls:
                place = call["repo_id"], call["local_dir"]
                assert place == (REPO, str(tmp_path / "Llama-3.1-8B"))
            return [call["filename"] for call in calls]

        fetch.listing, fetch.download = listing, download
        yield fetch


def http_error(status: int) -> HTTPError:
    return HTTPError(response=SimpleNamespace(status_code=status))


@pytest.mark.parametrize(
    ("asset_types", "files"),
    [
        ("tokenizer", TOKENIZER),
        ("safetensors", SAFETENSORS),
        (["tokenizer", "config", "safetensors", "index"], TOKENIZER + CONFIG + SAFETENSORS),
        ([], ALL),
    ],
)
def test_asset_types_choose_their_files_once_each(hub, asset_types, files):
    assert sorted(hub(asset_types, download_all=not asset_types)) == sorted(files)


def test_type_without_files_is_warned_of_and_nothing_downloaded(hub, capsys):
    hub.listing.return_value = OTHERS
    assert hub("tokenizer") == []
    assert "No matching files found for asset_type 'tokenizer'" in capsys.readouterr().out


def test_file_that_is_listed_but_not_there_is_skipped(hub, capsys):
    hub.listing.return_value = [*CONFIG, "missing_file.json"]

    def download(filename, **_):
        if filename == "missing_file.json":
            raise http_error(404)

    hub.download.side_effect = download
    assert len(hub("config", additional_patterns=["missing_file.json"])) == 3
    assert "File missing_file.json not found, skipping..." in capsys.readouterr().out


def test_other_errors_are_raised_and_a_listing_without_permission_hints_at_the_token(hub, capsys):
    hub.download.side_effect = http_error(500)
    with pytest.raises(HTTPError):
        hub("config")
    hub.listing.side_effect = http_error(401)
    with pytest.raises(HTTPError):
        hub("config")
    assert "--hf_token" in capsys.readouterr().out


def test_malformed_repository_and_unknown_type_are_refused_before_the_hub_is_asked(tmp_path):
    with pytest.raises(ValueError, match="Invalid repo_id format.*'llama'"):
        download_hf_assets("llama", str(tmp_path), "tokenizer")
    with pytest.raises(ValueError, match="Unknown asset type weights, known are tokenizer"):
        download_hf_assets(REPO, str(tmp_path), ["config", "weights"])


def test_command_line_fetches_what_it_names(hub, monkeypatch, tmp_path):
    arguments = ["--repo_id", REPO, "--local_dir", str(tmp_path), "--assets", "config", "index"]
    monkeypatch.setattr(sys, "argv", ["download", *arguments])
    main()
    files = [call.kwargs["filename"] for call in hub.download.call_args_list]
    assert sorted(files) == sorted(CONFIG + INDEX)
