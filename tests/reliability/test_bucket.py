"""Checkpoints and data in a bucket of an S3 server on this machine, which fails in many ways.

Needs moto[server] and s3fs; left out in CI, where tests/unit/checkpoint/test_bucket.py stands for it.
"""

import itertools
import random

import pytest

from tests.unit.checkpoint.runs import Run, assert_same
from torchtitan.tools import storage
from torchtitan.tools.errors import RunError

pytest.importorskip("moto.server")
pytest.importorskip("s3fs")
pytestmark = pytest.mark.slow


@pytest.fixture
def server(monkeypatch, tmp_path):
    from tests.reliability.s3_server import Server

    server = Server()
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore's; s3fs and `storage` try again, too
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(storage, "READ_SECONDS", 10)
    monkeypatch.setattr(storage, "UPLOAD_SECONDS", 3)
    import s3fs

    s3fs.S3FileSystem.clear_instance_cache()  # clients keep the address of an earlier server
    yield server
    server.close()


def run_at(disk, seed=0, **config) -> Run:
    return Run(disk, seed=seed, folder="s3://bucket/run", **config)


def assert_loads(disk, run: Run) -> None:
    """A run on another disk starts with all that `run` has."""
    other = run_at(disk, seed=1)
    assert other.manager.load()
    assert_same(run.everything(), other.everything())
    other.manager.close()


@pytest.mark.parametrize(
    ("fault", "async_mode"), [("throttles", "async"), ("fails", "disabled"), (0.2, "async")]
)
def test_bucket_that_often_fails_gets_whole_steps(server, tmp_path, fault, async_mode):
    rng = random.Random(0)
    server.fault = lambda method, path: fault if rng.random() < 0.4 else None
    run = run_at(tmp_path / "a", async_mode=async_mode)
    run.train_and_save(1, 2)
    assert_loads(tmp_path / "b", run)


def test_connection_lost_while_reading_is_made_again(server, tmp_path):
    run = run_at(tmp_path / "a")
    run.train_and_save(1)
    count = itertools.count()
    server.fault = lambda method, path: (
        "hangs up" if method == "GET" and "step-1" in path and next(count) % 2 else None
    )
    assert_loads(tmp_path / "b", run)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("refuses", r"the store refuses \(.*check the address, the cred"),
        ("throttles", "SlowDown|slow|busy|503|rate"),
    ],
)
def test_bucket_that_takes_no_more_ends_the_run_with_one_error_and_nothing_damaged(
    server, tmp_path, fault, message
):
    run = run_at(tmp_path / "a")
    run.train_and_save(1)
    server.fault = lambda method, path: fault if method == "PUT" and "distcp" in path else None
    run.train()
    with pytest.raises(RunError, match=message) as error:
        run.save(2)
    assert "step-2/__0_0.distcp" in str(error.value) and "\n" not in str(error.value)
    other = run_at(tmp_path / "b", seed=1)
    assert other.manager.load() and other.counter.step == 1
    server.fault = lambda method, path: None
    assert_loads(tmp_path / "a", run)
    assert_loads(tmp_path / "c", run)


def test_server_that_is_gone_ends_load_and_save_with_one_error(server, tmp_path):
    run = run_at(tmp_path / "a")
    run.train_and_save(1)
    server.close()
    with pytest.raises(RunError, match="the store does not answer.*s3://bucket/run"):
        run_at(tmp_path / "b").manager.load()
    run.train()
    with pytest.raises(RunError, match="does not answer.*last whole checkpoint.*step 2"):
        run.save(2)


def test_uploads_in_parts_that_a_kill_left_are_swept(server, tmp_path):
    client = server.client()
    for key in ("run/step-1/__0_0.distcp", "run/step-10/__0_0.distcp"):
        client.create_multipart_upload(Bucket="bucket", Key=key)
    run_at(tmp_path / "a").train_and_save(1)
    left = client.list_multipart_uploads(Bucket="bucket")["Uploads"]
    assert [upload["Key"] for upload in left] == ["run/step-10/__0_0.distcp"]
