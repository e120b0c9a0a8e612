"""Faults of token files; messages name the file, and the document or byte where there is one."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.reliability import jobs
from torchtitan.data import tokenize
from torchtitan.data.token_files import write_pair


def reads(folder: Path) -> list[str]:
    return ["--training.dataset=tokens", f"--training.dataset_path={folder}/tokens"]


def pair(change: Callable[[Path], object], ids: Sequence[int] = range(200)):
    """Arranges a job that reads tokens/a.bin and tokens/a.idx after `change(tokens)`."""

    def arrange(folder: Path) -> list[str]:
        tokens = folder / "tokens"
        tokens.mkdir()
        write_pair(str(tokens / "a"), [ids[:100], ids[100:]], np.dtype("<u2"))
        change(tokens)
        return reads(folder)

    return arrange


def tokenized(*options: str, **changed: object):
    """Arranges a job that reads a folder of `torchtitan.data.tokenize`.

    changed: entries of tokens.json that were changed afterwards.
    """

    def arrange(folder: Path) -> list[str]:
        (folder / "text.txt").write_text("one two three four\n" * 50)
        command = [f"{folder}/text.txt", f"{folder}/tokens", "--tokenizer", str(jobs.TOKENIZER)]
        tokenize.main([*command, "--processes", "1", *options])
        about = folder / "tokens/tokens.json"
        about.write_text(json.dumps(json.loads(about.read_text()) | changed))
        return reads(folder)

    return arrange


def overwrite(file: str, content: bytes, at: int = 0):
    def change(tokens: Path) -> None:
        old = (tokens / file).read_bytes()
        (tokens / file).write_bytes(old[:at] + content + old[at + len(content) :])

    return change


def cut(file: str, num_bytes: int):
    def change(tokens: Path) -> None:
        (tokens / file).write_bytes((tokens / file).read_bytes()[:-num_bytes])

    return change


def remove(*files: str):
    def change(tokens: Path) -> None:
        for file in files:
            (tokens / file).unlink()

    return change


FAULTS = {
    "token files without a path": lambda _folder: [
        "--training.dataset=tokens",
        "--training.dataset_path=None",
    ],
    "tokens without their index": pair(remove("a.idx")),
    "index of another format": pair(overwrite("a.idx", b"TNTIDX\0\0\0")),
    "index that is cut off": pair(cut("a.idx", 1)),
    "index that is damaged": pair(overwrite("a.idx", b"\xff\xff", at=42)),
    "ids beyond the vocabulary": pair(lambda _: None, ids=[1, 2048] * 100),
    "tokens of another tokenizer": tokenized("--eos_token", "<|pad|>"),
    "folder of tokens that is unfinished": tokenized(finished=False),
    "tokens.json of a later version": tokenized(format=2),
}
