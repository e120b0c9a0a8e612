"""Data at an address have the documents of the same files on a disk."""

import json
import os
import pickle
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from torchtitan.data import local_files
from torchtitan.data.local_files import load_local_documents, record_of
from torchtitan.data.token_files import TokenDocuments, write_pair
from torchtitan.tools import storage

TEXTS = [f"document {number} " + "ä" * (number * 37 % 300) for number in range(300)]
LINES = "\n\n".join(json.dumps({"text": text, "other": 1}) for text in TEXTS).encode()


def write_parquet(path: Path) -> None:
    table = pyarrow.table({"text": TEXTS, "unread": [os.urandom(20_000) for _ in TEXTS]})
    pyarrow.parquet.write_table(table, path, row_group_size=40, compression="none")


def write_zst(path: Path) -> None:
    with pyarrow.CompressedOutputStream(str(path), "zstd") as file:
        file.write(LINES)


WRITERS = {
    "a.jsonl": lambda path: path.write_bytes(LINES),
    "a.json": lambda path: path.write_text(json.dumps([{"text": text} for text in TEXTS])),
    "a.jsonl.zst": write_zst,
    "a.parquet": write_parquet,
    "a.txt": lambda path: path.write_text("\n".join(TEXTS * 20)),
}


@pytest.fixture
def bucket(tmp_path):
    """Return (a folder, the address that has its files after `upload`)."""
    (tmp_path / "data").mkdir()
    yield tmp_path / "data", "memory://bucket/data"
    fsspec.filesystem("memory").store.clear()
    storage._block.cache_clear()
    local_files._row_groups.clear()


def upload(folder: Path, address: str) -> None:
    for file in folder.rglob("*"):
        if file.is_file():
            storage.upload(str(file), f"{address}/{file.relative_to(folder)}")


@pytest.mark.parametrize("name", WRITERS)
def test_documents_and_their_names_equal_those_on_a_disk(bucket, name):
    folder, address = bucket
    WRITERS[name](folder / name)
    (folder / ".hidden.jsonl").write_text("not read")
    upload(folder, address)
    local, there = load_local_documents(str(folder)), load_local_documents(address)
    assert len(local) == len(there) > 1
    assert [there[i] for i in reversed(range(len(local)))] == list(local)[::-1]
    there = pickle.loads(pickle.dumps(there))
    assert there.where(7).removeprefix(address) == local.where(7).removeprefix(str(folder))
    assert load_local_documents(f"{address}/{name}")[3] == local[3]
    assert record_of(address, is_movable=True) == record_of(str(folder), is_movable=True) != {}


def test_parquet_reads_only_the_columns_and_row_groups_that_it_needs(bucket, monkeypatch):
    folder, address = bucket
    write_parquet(folder / "a.parquet")
    upload(folder, address)
    monkeypatch.setattr(storage, "_BLOCK", 2**14)
    ranges, read = [], storage.read_ranges
    monkeypatch.setattr(storage, "read_ranges", lambda parts: ranges.extend(parts) or read(parts))
    documents = load_local_documents(address)
    assert documents[0]["text"] == TEXTS[0] and documents[299]["text"] == TEXTS[299]
    size = (folder / "a.parquet").stat().st_size
    assert 0 < sum(end - start for _, start, end in ranges) < size / 20
    many = len(ranges)
    assert documents[1]["text"] == TEXTS[1] and len(ranges) == many  # the row group is kept


def test_missing_data_and_a_full_cache_are_refused(bucket, monkeypatch):
    folder, address = bucket
    with pytest.raises(FileNotFoundError, match="no file or folder 'memory://bucket/data/none'"):
        load_local_documents(f"{address}/none")
    write_zst(folder / "a.jsonl.zst")
    upload(folder, address)
    usage = local_files.shutil.disk_usage(folder)
    monkeypatch.setattr(local_files.shutil, "disk_usage", lambda path: usage._replace(total=-1))
    with pytest.raises(ValueError, match="more than half of the disk.*torchtitan tokenize"):
        load_local_documents(address)


def test_copy_that_another_process_finishes_meanwhile_does_not_fail_the_check(
    bucket, tmp_path, monkeypatch
):
    folder, address = bucket
    write_zst(folder / "a.jsonl.zst")
    upload(folder, address)
    glob = Path.glob
    monkeypatch.setattr(
        Path, "glob", lambda cache, names: [*glob(cache, names), tmp_path / "gone.unfinished"]
    )
    assert len(load_local_documents(address)) == 300


def test_row_groups_in_memory_are_bounded_by_their_bytes(bucket, monkeypatch):
    folder, address = bucket
    write_parquet(folder / "a.parquet")
    upload(folder, address)
    documents, reads = load_local_documents(address), []
    read = local_files._parquet_as_lines
    monkeypatch.setattr(
        local_files, "_parquet_as_lines", lambda *args: reads.append(args[2]) or read(*args)
    )
    size = sum(len(json.dumps({"text": text}, ensure_ascii=False).encode()) for text in TEXTS[:120])
    monkeypatch.setattr(local_files, "_ROW_GROUP_BYTES", 2 * size)  # more than three groups
    for _ in range(2):
        assert [documents[n]["text"] for n in (0, 40, 80)] == [TEXTS[n] for n in (0, 40, 80)]
    assert reads == [[0], [1], [2]]
    monkeypatch.setattr(local_files, "_ROW_GROUP_BYTES", size // 3)  # less than two
    for n in (120, 121, 0, 1):
        assert documents[n]["text"] == TEXTS[n]
    assert reads[3:] == [[3], [0]] and len(local_files._row_groups) == 1


def test_token_files_at_an_address_are_those_on_a_disk(bucket):
    folder, address = bucket
    documents = [np.arange(n % 50 + 1) for n in range(100)]
    for part in ("a", "b"):
        write_pair(str(folder / part), documents, np.dtype("<u2"))
    upload(folder, address)
    local, there = TokenDocuments(str(folder)), TokenDocuments(address)
    assert len(there) == 200 and there.num_tokens == local.num_tokens
    assert np.array_equal(there.lengths, local.lengths)
    there = pickle.loads(pickle.dumps(there))
    assert all(np.array_equal(there[i], documents[i % 100]) for i in range(200))
    assert len(TokenDocuments(f"{address}/b.bin")) == len(TokenDocuments(f"{address}/b")) == 100
    storage.delete(f"{address}/b.idx")
    with pytest.raises(ValueError, match="memory://bucket/data/b.idx: missing"):
        TokenDocuments(address)
