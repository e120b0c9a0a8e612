"""Faults of data files and tokenizers; messages name the file and the line."""

import gzip
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.reliability import jobs
from tests.reliability.faults import Fault
from tests.reliability.faults.config import flags

GOOD_LINE = '{"text": "one two three four five six seven eight nine ten"}\n'


def data_file(name: str, content: str | bytes, *arguments: str):
    """Arranges a job that reads one file."""

    def arrange(folder: Path) -> Sequence[str]:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        data = f"--training.dataset_path={folder / name.split('/')[0]}"
        return ["--training.dataset=local", data, *arguments]

    return arrange


def third_line(line: str | bytes, *arguments: str, **more):
    """The third line of a file of JSON lines is wrong."""
    line = line if isinstance(line, bytes) else line.encode()
    content = GOOD_LINE.encode() * 2 + line + b"\n"
    return Fault(data_file("data.jsonl", content, *arguments), **more)


def tokenizer(files: dict[str, str | bytes]):
    """files: of the tokenizer's folder."""

    def arrange(folder: Path) -> Sequence[str]:
        (folder / "tokenizer").mkdir()
        for file, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            (folder / "tokenizer" / file).write_bytes(data)
        return [f"--model.hf_assets_path={folder}/tokenizer"]

    return arrange


def other_tokenizer(folder: Path) -> Path:
    """Return a copy of the tokenizer that has two tokens in each other's place."""
    copy = shutil.copytree(jobs.TOKENIZER, folder / "tokenizer")
    content = json.loads((copy / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    vocab["od"], vocab["st"] = vocab["st"], vocab["od"]
    (copy / "tokenizer.json").write_text(json.dumps(content))
    return copy


def _tokenizer_with_a_far_id() -> str:
    content = json.loads((jobs.TOKENIZER / "tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 50_000
    return json.dumps(content)


WHOLE = (jobs.TOKENIZER / "tokenizer.json").read_bytes()

FAULTS = {
    "line that is not JSON": third_line('{"text": "one"'),
    "line that is not JSON, read by one of two ranks": third_line('{"text": "one"', ranks=2),
    "line without a text": third_line('{"body": "one"}'),
    "data file that is empty": data_file("data.jsonl", "\n \n"),
    "data file that is binary": data_file("data.jsonl", bytes(range(128, 256)) * 20),
    "compressed file that is none": data_file("data.jsonl.gz", bytes(range(256)) * 20),
    "compressed file that is cut off": data_file(
        "data.jsonl.gz",
        gzip.compress((GOOD_LINE * 500 + "".join(map(str, range(5000)))).encode())[:2000],
    ),
    "Parquet file that is damaged": data_file("data.parquet", bytes(range(256)) * 20),
    "JSON in UTF-16": data_file("data.jsonl", GOOD_LINE.encode("utf-16")),
    "folder without data": data_file("folder/data.csv", "a,b\n"),
    "data that are not there": flags(
        "--training.dataset=local", "--training.dataset_path=/nowhere/data.jsonl"
    ),
    "dataset of a hub that is offline": flags(
        "--training.dataset=c4", "--training.dataset_path=None"
    ),
    "folder without a tokenizer": tokenizer({"config.json": "{}"}),
    "tokenizer.json that is damaged": tokenizer({"tokenizer.json": WHOLE[:1000]}),
    "token ids beyond the model's vocabulary": tokenizer(
        {"tokenizer.json": _tokenizer_with_a_far_id()}
    ),
}
