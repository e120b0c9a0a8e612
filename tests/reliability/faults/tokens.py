"""Faults of token files; messages name the file, and the document or byte where there is one."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.reliability import jobs
from tests.reliability.faults import Fault
from torchtitan.data import tokenize
from torchtitan.data.token_files import write_pair

COPY_AGAIN = "Copy both files of the pair again."
CUT_OFF = "A copy was interrupted, or the disk was full."


def reads(folder: Path) -> list[str]:
    return ["--training.dataset=tokens", f"--training.dataset_path={folder}/tokens"]


def pair(change: Callable[[Path], object], ids: Sequence[int] = range(200)):
    """Arranges a job that reads tokens/a.bin and tokens/a.idx after `change(tokens)`."""

    def arrange(folder: Path) -> list[str]:
        tokens = folder / "tokens"
        tokens.mkdir()
        write_pair(str(tokens / "a"), [[ids[:100]], [ids[100:]]], np.dtype("<u2"))
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


def token_fault(name: str, message: str, cause: str, remedy: str, arrange: Callable, **more):
    return Fault(name, f"error: {message}", cause, remedy, arrange, **{"exit_code": 1} | more)


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


FAULTS = [
    Fault(
        name="token files that are not there",
        message="config error: training.dataset_path must be an existing file or folder, or the name of "
        "a dataset on the hub, got '/nowhere/tokens' …",
        cause="The path is wrong, or relative to another folder.",
        remedy="Correct the path.",
        arrange=lambda _folder: [
            "--training.dataset=tokens",
            "--training.dataset_path=/nowhere/tokens",
        ],
    ),
    Fault(
        name="token files without a path",
        message="config error: training.dataset = 'tokens' reads the file or folder "
        "training.dataset_path, which must exist, got None …; set or correct the path",
        cause="The key was left out.",
        remedy="Set training.dataset_path.",
        arrange=lambda _folder: ["--training.dataset=tokens", "--training.dataset_path=None"],
    ),
    token_fault(
        "folder without token files",
        "there are no token files at '…tokens' (looked in …): need a folder with pairs of .bin and .idx "
        "files, or one such pair; write some with `python -m torchtitan.data.tokenize`, or correct the path",
        "The folder holds text, or is another one.",
        "Tokenize the text, or read it with training.dataset = 'local'.",
        pair(remove("a.bin", "a.idx")),
    ),
    token_fault(
        "tokens without their index",
        "…a.idx is missing, and its pair cannot be read without it; copy it there, or remove the rest "
        "of the pair",
        CUT_OFF,
        "Copy the file.",
        pair(remove("a.idx")),
    ),
    token_fault(
        "index without its tokens",
        "…a.bin is missing, and its pair cannot be read without it; …",
        "As above.",
        "As above.",
        pair(remove("a.bin")),
    ),
    token_fault(
        "index of another format",
        "…a.idx must begin with b'MMIDIDX\\x00\\x00', got b'TNTIDX\\x00\\x00…': it is not an index of "
        "Megatron-LM's memory-mapped format; write the pair in that format",
        "The corpus was written with Megatron-LM's --dataset-impl lazy or cached.",
        "Write it again with mmap.",
        pair(overwrite("a.idx", b"TNTIDX\0\0\0")),
    ),
    token_fault(
        "index of floats",
        "…a.idx has version 1, and the code 6 for the type of its ids, and version 1 with the codes of "
        "integers, 1, 2, 3, 4, 5, 8, is known; write the pair with these",
        "The files hold embeddings.",
        "Give the files with token ids.",
        pair(overwrite("a.idx", b"\6", at=17)),
    ),
    token_fault(
        "index that is cut off",
        "…a.idx has 81 bytes, and 82 are needed for its 2 sequences and 2 documents: it was cut off or "
        "overwritten; copy it again",
        CUT_OFF,
        "Copy it again.",
        pair(cut("a.idx", 1)),
    ),
    token_fault(
        "tokens that are cut off",
        "…a.bin has 399 bytes, and its index lists 400: one of the two files was cut off, or they are of "
        "different pairs; copy both again",
        CUT_OFF,
        COPY_AGAIN,
        pair(cut("a.bin", 1)),
    ),
    token_fault(
        "index that is damaged",
        "…a.bin, document 0 (counted from 0): the index is damaged, because it lists sequences at "
        "bytes [65535] for bytes 0 to 65735 of 400; copy the .idx file again, or write the pair again",
        "A bad disk or copy.",
        COPY_AGAIN,
        pair(overwrite("a.idx", b"\xff\xff", at=42)),
    ),
    token_fault(
        "ids beyond the vocabulary",
        "…a.bin, document 0 (counted from 0) has the id 2048, and the tokenizer's ids are 0 to 2047; "
        "train with the tokenizer that made these tokens",
        "The corpus was made for another model.",
        "Set model.hf_assets_path to the corpus's tokenizer.",
        pair(lambda _: None, ids=[1, 2048] * 100),
    ),
    token_fault(
        "token files without a token",
        "dataset 'tokens' in …tokens: 100000 documents in a row gave no tokens, because they are empty or "
        "training.too_long leaves them out; give it other documents, or raise training.seq_len",
        "The program that wrote the files got empty texts.",
        "Write the pair again.",
        pair(lambda _: None, ids=[]),
    ),
    token_fault(
        "tokens of another tokenizer",
        "…tokens was written with another tokenizer: tokens.json has the hash …, and the tokenizer of "
        "this job has …; train with the tokenizer that wrote the folder, or tokenize the text again",
        "The tokenizer, or its end-of-text token, is another one.",
        "Tokenize the text again.",
        tokenized("--eos_token", "<|pad|>"),
    ),
    token_fault(
        "folder of tokens that is unfinished",
        "…tokens.json says that the folder is unfinished; run the same `python -m "
        "torchtitan.data.tokenize` again, which goes on where it was stopped",
        "The command was stopped, or still runs.",
        "Run the same command again.",
        tokenized(finished=False),
    ),
    token_fault(
        "part that is missing",
        "…tokens.json lists (1, 352) as the documents and tokens of part-00001, and the folder has nothing "
        "there; copy the whole folder again, or move other files out of it",
        "A copy was interrupted.",
        "Copy the whole folder again.",
        tokenized(
            parts=[
                {"name": f"part-0000{number}", "documents": 1, "tokens": 352} for number in range(2)
            ]
        ),
    ),
    token_fault(
        "tokens.json of a later version",
        "…tokens.json cannot be read: its format is 2, and 1 is known; copy it again, or tokenize the "
        "text again",
        "A later version of this package wrote the folder.",
        "Tokenize the text again.",
        tokenized(format=2),
    ),
]
