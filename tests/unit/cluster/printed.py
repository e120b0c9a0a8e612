"""What `torchtitan launch` prints, called in this process."""

import contextlib
import io
import sys

import pytest
import yaml

from torchtitan.commands import launch


def printed(*arguments: object) -> str:
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as text:
        patch.setattr(sys, "argv", ["torchtitan launch", *map(str, arguments)])
        launch.main()
    return text.getvalue()


def documents(*arguments: object) -> list[dict]:
    return list(yaml.safe_load_all(printed(*arguments)))
