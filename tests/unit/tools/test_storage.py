"""Addresses, by stores in memory and in folders; tests/reliability/test_bucket.py has a real S3 server."""

import errno
import os
import subprocess
import sys

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from torchtitan.config import ConfigManager
from torchtitan.config.checks import check_job_config
from torchtitan.tools import storage
from torchtitan.tools.errors import ConfigError, RunError
from torchtitan.tools.files import open_file


@pytest.fixture
def bucket():
    yield "memory://bucket"
    fsspec.filesystem("memory").store.clear()
    storage._block.cache_clear()


def put(address: str, content: bytes) -> None:
    fsspec.filesystem("memory").pipe_file(address, content)


def test_address_begins_with_a_scheme():
    addresses, paths = ("s3://b/x", "hf://datasets/a/b"), ("/a//b", "./x:y", "")
    assert all(map(storage.is_address, addresses)) and not any(map(storage.is_address, paths))


def test_paths_on_a_disk_import_no_fsspec(tmp_path):
    code = (
        "import sys; from torchtitan.tools import files, storage; storage.write_text(sys.argv[1], 'x');"
        "assert files.read_text(sys.argv[1]) == 'x' and storage.stat(sys.argv[1]).st_size == 1;"
        "assert 'fsspec' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=True)


def test_ranges_equal_the_files_and_memory_is_bounded(bucket, monkeypatch):
    monkeypatch.setattr(storage, "_BLOCK", 64)
    content = os.urandom(20_000)
    put(f"{bucket}/x", content)
    file = storage.RangedFile(f"{bucket}/x")
    for part in (slice(0, 5), slice(60, 70), slice(-9, None), slice(1, 19_000), slice(7, 7)):
        assert file[part] == content[part]
    assert [file.seek(-3, 2), file.read(), file.read(1)] == [19_997, content[-3:], b""]
    for start in range(0, 20_000, 60):
        assert file[start : start + 3] == content[start : start + 3]
    assert storage._block.cache_info().currsize == storage._BLOCKS_KEPT
    assert open_file(f"{bucket}/x", "rb").read() == content


class Store:
    """Fails with `errors`, one after another, and then has a file of one byte.

    It has its own clock: each failure takes `seconds`, and sleeping does not wait.
    """

    def __init__(self) -> None:
        self.errors: list[Exception] = []
        self.seconds, self.time = 0.0, 0.0

    def monotonic(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds

    def invalidate_cache(self) -> None: ...

    def info(self, path: str) -> dict:
        if self.errors:
            self.time += self.seconds
            raise self.errors.pop(0)
        return {"type": "file", "size": 1}


@pytest.fixture
def store(monkeypatch):
    """The store of every address."""
    store = Store()
    monkeypatch.setattr(storage, "time", store)
    monkeypatch.setattr(storage, "resolve", lambda address: (store, "x"))
    return store


def test_busy_store_is_asked_again_until_the_time_is_over(store):
    store.errors = [OSError("SlowDown"), ConnectionResetError("lost")]
    assert storage.stat("s3://b/x").st_size == 1
    store.errors, store.time = [OSError("SlowDown")] * 99, 0.0
    with pytest.raises(RunError, match=r"does not answer \(OSError: SlowDown\): 's3://b/x'"):
        storage.stat("s3://b/x")
    assert storage.READ_SECONDS / 2 < store.time <= storage.READ_SECONDS
    assert 90 < len(store.errors) < 99


def test_transfer_that_takes_longer_than_retries_is_retried_three_times(store):
    store.errors, store.seconds = [ConnectionResetError("lost")] * 3, storage.READ_SECONDS + 5
    assert storage.stat("s3://b/x").st_size == 1
    store.errors = [TimeoutError("the store hangs")] * 9
    with pytest.raises(RunError, match="does not answer"):
        storage.stat("s3://b/x")
    assert len(store.errors) == 5


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError("Forbidden"), r"refuses \(PermissionError: Forbidden\); check.*'s3://b/x"),
        (OSError(errno.ENOSPC, "full"), "no room for a copy"),
        (RuntimeError("Unable to locate credentials"), "the store refuses.*check"),
    ],
)
def test_failure_that_no_repetition_mends_is_told_at_once(store, error, message):
    store.errors = [error, error]
    with pytest.raises(OSError, match=message):
        storage.stat("s3://b/x")
    assert len(store.errors) == 1


def test_missing_file_is_no_failure(store):
    store.errors = [FileNotFoundError("x")]
    assert storage.stat("s3://b/x") is None


class Objects(MemoryFileSystem):
    """What a test has put to memory://, at gs:// and hf://, which name objects without a slash in front."""

    @classmethod
    def _strip_protocol(cls, path):
        return "/" + path.partition("://")[2].strip("/") if "://" in path else path


class ReadOnly(Objects):
    def pipe_file(self, path, value, **options):
        raise NotImplementedError


@pytest.mark.parametrize("scheme", ["gs", "hf"])
def test_address_of_any_kind_is_read_by_fsspecs_file_system(bucket, monkeypatch, scheme):
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, scheme, Objects)
    address = f"{scheme}://datasets/a"
    storage.write_text(f"{address}/x/y", "text")
    assert storage.find(address)["x/y"].st_size == 4 and storage.names_in(address) == ["x"]
    assert storage.is_folder(f"{address}/x") and not storage.is_folder(f"{address}/z")
    assert open_file(f"{address}/x/y").read() == "text"
    storage.check_writable(address)
    storage.delete(f"{address}/x/y")
    assert storage.find(address) == {}
    monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, scheme, ReadOnly)
    with pytest.raises(ConfigError, match=f"checkpoint.folder.*{address}.*only reads"):
        check_key("checkpoint.folder", address)


def test_listing_of_something_else_is_refused(bucket, monkeypatch):
    put(f"{bucket}/a/x", b"1")
    found = {"/elsewhere/x": {"size": 1, "type": "file"}}
    monkeypatch.setattr(MemoryFileSystem, "find", lambda self, path, **options: found)
    with pytest.raises(storage.StorageError, match="lists /elsewhere/x.*not below"):
        storage.find(f"{bucket}/a")


def check_key(key: str, address: str) -> None:
    check_job_config(ConfigManager().parse_args(["--checkpoint.enable", f"--{key}={address}"]))


ON_A_DISK = "{key} must be on a disk.*memory://b/x.*name the copy"


@pytest.mark.parametrize(
    ("key", "address", "message"),
    [
        ("job.dump_folder", "memory://b/x", ON_A_DISK),
        ("model.hf_assets_path", "memory://b/x", ON_A_DISK),
        ("metrics.save_tb_folder", "memory://b/x", ON_A_DISK),
        ("checkpoint.folder", "abfs://b/x", r"{key}: abfs://b/x.*install .*\[cloud\]"),
        ("checkpoint.folder", "zzz://b", "{key}: zzz://b is not an address that"),
        (
            "checkpoint.folder",
            f"file://{__file__}/run",
            "{key} must be an .* to which this job may",
        ),
    ],
)
def test_address_of_no_use_is_told_before_the_run(monkeypatch, key, address, message):
    monkeypatch.setitem(sys.modules, "adlfs", None)  # the package of abfs
    with pytest.raises(ConfigError, match=message.replace("{key}", key)):
        check_key(key, address)


def test_hugging_face_files_are_fetched_once_until_they_change(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for name in ("config.json", "model.safetensors", "model.bin", "original/a.json"):
        put(f"{bucket}/m/{name}", name.encode())
    copy = storage.fetched(f"{bucket}/m")
    assert sorted(os.listdir(copy)) == ["config.json", "model.safetensors"]
    monkeypatch.setattr(fsspec.filesystem("memory").__class__, "get_file", None)
    assert storage.fetched(f"{bucket}/m/") == copy
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    put(f"{bucket}/m/config.json", b"another")
    assert (other := storage.fetched(f"{bucket}/m")) != copy
    assert open(os.path.join(other, "config.json")).read() == "another"
    with pytest.raises(
        FileNotFoundError, match="no files of a Hugging Face model.*memory://bucket/n"
    ):
        storage.fetched(f"{bucket}/n")


def test_interrupted_fetch_continues_with_the_files_that_are_missing(bucket, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    names = [f"{n}.safetensors" for n in range(4)]
    for name in names:
        put(f"{bucket}/m/{name}", name.encode())
    transfer, done = storage._transfer, []

    def transfer_some(address: str, path: str, is_upload: bool) -> None:
        if len(done) == 2:
            with open(path, "wb") as file:
                file.write(b"x" * 13)  # as long as the file, but a store's client wrote only holes
            raise storage.StorageError(errno.EIO, "killed", address)
        transfer(address, path, is_upload)
        done.append(address.rpartition("/")[2])

    monkeypatch.setattr(storage, "_transfer", transfer_some)
    with pytest.raises(storage.StorageError, match="killed"):
        storage.fetched(f"{bucket}/m")
    assert done == names[:2]
    done[:] = [""] * 3
    copy = storage.fetched(f"{bucket}/m")
    assert done[3:] == names[2:] and sorted(os.listdir(copy)) == names
    assert [open(os.path.join(copy, name)).read() for name in names] == names
