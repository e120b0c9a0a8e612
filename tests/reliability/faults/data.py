"""Faults of data files and tokenizers; messages name the file and the line."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from tests.reliability import jobs
from tests.reliability.faults import Fault

GOOD_LINE = '{"text": "one two three four five six seven eight nine ten"}\n'
MEND_LINE = "Correct the line or take it out."


def data_file(name: str, content: str | bytes, *arguments: str):
    """Arranges a job that reads one file."""

    def arrange(folder: Path) -> Sequence[str]:
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return [
            "--training.dataset=local",
            f"--training.dataset_path={folder / name.split('/')[0]}",
            *arguments,
        ]

    return arrange


def line_fault(name: str, line: str | bytes, says: str, cause: str, *arguments: str, **more):
    """The third line of a file of JSON lines is wrong."""
    line = line if isinstance(line, bytes) else line.encode()
    content = GOOD_LINE.encode() * 2 + line + b"\n"
    return Fault(
        name,
        f"error: …data.jsonl, line 3: {says}",
        cause,
        MEND_LINE,
        data_file("data.jsonl", content, *arguments),
        **({"exit_code": 1} | more),
    )


def file_fault(
    name: str, file: str, content: str | bytes, message: str, cause: str, remedy: str, **more
):
    return Fault(
        name,
        f"error: {message}",
        cause,
        remedy,
        data_file(file, content),
        **{"exit_code": 1} | more,
    )


def tokenizer_fault(
    name: str, files: dict[str, str | bytes], message: str, cause: str, remedy: str, exit_code=1
):
    """files: of the tokenizer's folder; True stands for the tests' tokenizer.json."""

    def arrange(folder: Path) -> Sequence[str]:
        (folder / "tokenizer").mkdir()
        for file, content in files.items():
            data = content if isinstance(content, bytes) else content.encode()
            (folder / "tokenizer" / file).write_bytes(data)
        return [f"--model.hf_assets_path={folder}/tokenizer"]

    return Fault(name, f"error: {message}", cause, remedy, arrange, exit_code)


def _tokenizer_with_a_far_id() -> str:
    content = json.loads((jobs.TOKENIZER / "tokenizer.json").read_text())
    content["model"]["vocab"]["far"] = 50_000
    return json.dumps(content)


FETCH_AGAIN = "Fetch the file again."
WHOLE = (jobs.TOKENIZER / "tokenizer.json").read_bytes()

FAULTS = [
    line_fault(
        "line that is not JSON",
        '{"text": "one"',
        "not valid JSON (…); every line must be one object like …",
        "The file was cut off while it was written, or a quote is missing.",
    ),
    line_fault(
        "line that is not JSON, read by a data worker",
        '{"text": "one"',
        "not valid JSON (…); every line must be one object like …",
        "As above; the worker's stack is not printed.",
        "--training.dataloader.num_workers=1",
    ),
    line_fault(
        "line that is not JSON, read by one of two ranks",
        '{"text": "one"',
        "not valid JSON (…)…",
        "As above; the other rank points to this message.",
        ranks=2,
    ),
    line_fault(
        "null for a text",
        '{"text": null}',
        "need an object with a string under 'text', got null there",
        "The tool that wrote the data had no text for this document.",
    ),
    line_fault(
        "line without a text",
        '{"body": "one"}',
        "need an object with a string under 'text', got the keys ['body']",
        "The text is under another key.",
    ),
    line_fault(
        "half of a surrogate pair",
        '{"text": "a \\ud800 b"}',
        "the text has half of a surrogate pair, '\\ud800', which is not a character; …",
        "A text was cut in the middle of a character outside the basic plane.",
    ),
    line_fault(
        "JSON nested too deeply",
        '{"text": ' + "[" * 100_000,
        "not valid JSON (maximum recursion depth exceeded …); …",
        "The line is no document.",
    ),
    line_fault(
        "line that is not UTF-8",
        b'{"text": "\xff\xfe"}',
        "not valid JSON ('utf-8' codec can't decode byte 0xff …); …",
        "The file is in another encoding, or damaged.",
    ),
    file_fault(
        "data file that is empty",
        "data.jsonl",
        "\n \n",
        "dataset 'local' holds no documents: …data.jsonl is empty",
        "Whatever should have written it failed, or the disk was full.",
        "Write the file again, or correct training.dataset_path.",
    ),
    file_fault(
        "data file that is empty, on two ranks",
        "data.jsonl",
        "",
        "dataset 'local' holds no documents: …data.jsonl is empty",
        "As above.",
        "Write the file again, or correct training.dataset_path.",
        ranks=2,
    ),
    file_fault(
        "data file that is binary",
        "data.jsonl",
        bytes(range(128, 256)) * 20,
        "…data.jsonl, line 1: not valid JSON ('utf-8' codec can't decode …",
        "Another file's name was given.",
        "Correct training.dataset_path.",
    ),
    file_fault(
        "text file that is not UTF-8",
        "data.txt",
        b"hello \xff there",
        "…data.txt is not UTF-8 text: invalid start byte at byte 6; convert the file to UTF-8",
        "The file is in another encoding.",
        "Convert it: `iconv -t utf-8`.",
    ),
    file_fault(
        "JSON list that is not whole",
        "data.json",
        '[{"text": "one"}, ',
        "…data.json begins like a list, and is not valid JSON: …",
        "The file was cut off while it was written.",
        "Write it again.",
    ),
    file_fault(
        "compressed file that is none",
        "data.jsonl.gz",
        bytes(range(256)) * 20,
        "…data.jsonl.gz cannot be unpacked: Not a gzipped file (…); …",
        "The name is wrong, or the file is an error page.",
        FETCH_AGAIN,
    ),
    file_fault(
        "compressed file that is cut off",
        "data.jsonl.gz",
        gzip.compress((GOOD_LINE * 500 + "".join(map(str, range(5000)))).encode())[:2000],
        "…data.jsonl.gz cannot be unpacked: Compressed file ended before the end-of-stream marker was "
        "reached; …",
        "A download was interrupted.",
        FETCH_AGAIN,
    ),
    file_fault(
        "Parquet file that is damaged",
        "data.parquet",
        bytes(range(256)) * 20,
        "…data.parquet cannot be read as Parquet: Parquet magic bytes not found in footer. …",
        "A download was interrupted.",
        FETCH_AGAIN,
    ),
    file_fault(
        "JSON in UTF-16",
        "data.jsonl",
        GOOD_LINE.encode("utf-16"),
        "…data.jsonl is in UTF-16 or UTF-32, and JSON must be in UTF-8; convert it: iconv …",
        "PowerShell's > wrote the file.",
        "Convert the file with iconv.",
    ),
    file_fault(
        "folder without data",
        "folder/data.csv",
        "a,b\n",
        "training.dataset_path must be a data file or a folder with files of one kind (…), got "
        "'…folder' with no such file",
        "The folder is another one, or its files end otherwise.",
        "Correct training.dataset_path, or rename the files.",
    ),
    Fault(
        name="data that are not there",
        message="config error: training.dataset_path must be an existing file or folder, or the "
        "name of a dataset on the hub, got '/nowhere/data.jsonl' …",
        cause="The path is wrong, or relative to another folder.",
        remedy="Correct the path.",
        arrange=lambda _folder: [
            "--training.dataset=local",
            "--training.dataset_path=/nowhere/data.jsonl",
        ],
    ),
    Fault(
        name="unknown dataset",
        message="config error: training.dataset must be a registered dataset (…), got 'c5'; "
        "correct it, or …",
        cause="A typing error, or the module that registers it was not imported.",
        remedy="Correct the name, or name the module in experimental.custom_import.",
        arrange=lambda _folder: ["--training.dataset=c5"],
    ),
    Fault(
        name="dataset of a hub that is offline",
        message="error: cannot load the dataset 'allenai/c4' from the hub: "
        "…; set training.dataset_path (or validation.dataset_path) to a copy on this machine, or "
        "training.dataset to 'local'",
        cause="This machine has no network, or HF_HUB_OFFLINE is set.",
        remedy="Set training.dataset_path to a copy.",
        arrange=lambda _folder: ["--training.dataset=c4", "--training.dataset_path=None"],
        exit_code=1,
    ),
    tokenizer_fault(
        "folder without a tokenizer",
        {"config.json": "{}"},
        "no tokenizer in '…tokenizer': it needs tokenizer.json, …; files there: config.json",
        "The folder is of the weights alone, or a download is not complete.",
        "Fetch it with scripts/download_hf_assets.py --assets tokenizer.",
    ),
    tokenizer_fault(
        "tokenizer.json that is damaged",
        {"tokenizer.json": WHOLE[:1000]},
        "cannot read the tokenizer in …tokenizer.json: …; fetch the file again",
        "A download was interrupted, or the file is a Git LFS pointer.",
        FETCH_AGAIN,
    ),
    tokenizer_fault(
        "tokenizer_config.json of another shape",
        {"tokenizer.json": WHOLE, "tokenizer_config.json": '{"added_tokens_decoder": [1]}'},
        "…tokenizer_config.json: added_tokens_decoder must be an object, got a list",
        "The file was edited, or belongs to another tool.",
        FETCH_AGAIN,
    ),
    tokenizer_fault(
        "tokenizer of a class with rules of its own",
        {"tokenizer.json": WHOLE, "tokenizer_config.json": '{"tokenizer_class": "T5Tokenizer"}'},
        "…tokenizer_config.json: tokenizer_class 'T5Tokenizer' stands for rules that are not known here; "
        "write tokenizer.json with: python -c …",
        "transformers builds the tokenizer by rules that are not in tokenizer.json.",
        "Run the command, and name the new folder.",
    ),
    tokenizer_fault(
        "token ids beyond the model's vocabulary",
        {"tokenizer.json": _tokenizer_with_a_far_id()},
        "the tokenizer at model.hf_assets_path must not have more tokens than the model, got 50001 "
        "tokens and vocab_size 2048; …",
        "The tokenizer belongs to another model.",
        "Take the tokenizer of the flavor, or a flavor with a larger vocabulary.",
        exit_code=2,
    ),
]
