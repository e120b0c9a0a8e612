"""Faults of token files; tests/unit/data/test_token_files.py has those of their content."""

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


def of_other_tokenizer(folder: Path) -> list[str]:
    (folder / "text.txt").write_text("one two three four\n" * 50)
    command = [f"{folder}/text.txt", f"{folder}/tokens", "--tokenizer", str(jobs.TOKENIZER)]
    tokenize.main([*command, "--processes", "1", "--eos_token", "<|pad|>"])
    return reads(folder)


FAULTS = {
    "tokens without their index": pair(lambda tokens: (tokens / "a.idx").unlink()),
    "ids beyond the vocabulary": pair(lambda _: None, ids=[1, 2048] * 100),
    "tokens of another tokenizer": of_other_tokenizer,
}
