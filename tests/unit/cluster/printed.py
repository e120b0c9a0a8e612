"""What `torchtitan launch` prints, called in this process."""

import sys

import pytest
import yaml

from torchtitan.commands import launch


def printed(capsys, *arguments: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["torchtitan launch", *map(str, arguments)])
        launch.main()
    return capsys.readouterr().out


def documents(capsys, *arguments: str) -> list[dict]:
    return list(yaml.safe_load_all(printed(capsys, *arguments)))
