"""Checkpoints in an object store, against a server that speaks S3 on loopback: the same rule as on a disk."""

import functools
import json
import logging
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.checkpoint import storage as storage_module
from paceline.checkpoint import storage_object
from paceline.checkpoint.folders import list_steps, newest_valid, quarantine, read_manifest, step_folder, tidy
from paceline.checkpoint.manifest import COMMIT_FILE, MANIFEST_FILE
from paceline.checkpoint.storage import Storage, explain, open_storage
from paceline.checkpoint.verify import quick, verify, verify_folder
from paceline.errors import JobError
from tests.checkpoint.savers import equal, odd_tensors, ranks, saved
from tests.checkpoint.small import write_checkpoint

BUCKET = "checkpoints"
PLACE = f"s3://{BUCKET}/runs/tiny"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """A server of its own for these tests, with what it says kept quiet."""
    server_module = pytest.importorskip("moto.moto_server.threaded_moto_server")
    pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def storage(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Storage:
    """A fresh bucket, reached as a user would: by the environment alone."""
    import fsspec

    urllib.request.urlopen(urllib.request.Request(f"{endpoint}/moto-api/reset", method="POST"), timeout=30)
    sign_in(monkeypatch, endpoint)
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(BUCKET)
    return open_storage(PLACE)


def sign_in(monkeypatch: pytest.MonkeyPatch, endpoint: str, key: str = "test", secret: str = "test") -> None:
    import fsspec

    fsspec.filesystem("s3").clear_instance_cache()
    for name, value in {
        "AWS_ACCESS_KEY_ID": key,
        "AWS_SECRET_ACCESS_KEY": secret,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_CONFIG_FILE": "/nonexistent",
        "AWS_SHARED_CREDENTIALS_FILE": "/nonexistent",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():
        monkeypatch.setenv(name, value)


@functools.cache
def client(endpoint: str, service: str = "s3") -> Any:
    """The store's owner, past this product."""
    boto3 = pytest.importorskip("boto3")
    who = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
    return boto3.client(service, endpoint_url=endpoint, **who)


def test_a_checkpoint_is_written_verified_damaged_and_set_aside(storage: Storage, endpoint: str) -> None:
    for step in (90, 100):
        write_checkpoint(storage, step)
    assert list_steps(storage) == [90, 100] and read_manifest(storage, 100).step == 100
    assert verify(storage, 100) == [] and quick(storage, 100) == []
    assert [(v.step, v.findings) for v in verify_folder(PLACE)] == [(90, ()), (100, ())]
    assert [v.step for v in verify_folder(f"{PLACE}/{step_folder(90)}")] == [90]

    key = f"runs/tiny/{step_folder(100)}/rank-00001.safetensors"
    data = bytearray(storage.read(f"{step_folder(100)}/rank-00001.safetensors"))
    data[-1] ^= 1
    client(endpoint).put_object(Bucket=BUCKET, Key=key, Body=bytes(data))
    assert [finding.file for finding in verify(storage, 100)] == ["rank-00001.safetensors"]
    client(endpoint).delete_object(Bucket=BUCKET, Key=key)
    assert [(f.file, f.actual) for f in quick(storage, 100)] == [("rank-00001.safetensors", "no such file")]
    assert newest_valid(storage, quick).step == 90

    moved = quarantine(storage, 100, "a bit flipped")
    assert list_steps(storage) == [90] and COMMIT_FILE in storage.names(moved)
    storage.remove_folder(step_folder(90))
    assert storage.names() == ["quarantine"]


def test_the_mark_is_put_last_and_removed_first(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:  # BL-39
    seen: list[tuple[str, str]] = []
    monkeypatch.setattr(
        storage_module, "on_operation", lambda operation, path: seen.append((operation, Path(path).name))
    )
    write_checkpoint(storage, 100, count=2)
    made = [name for operation, name in seen if operation == "create"]
    assert made == ["rank-00000.safetensors", "rank-00001.safetensors", MANIFEST_FILE, COMMIT_FILE]
    seen.clear()
    storage.remove_folder(step_folder(100))
    gone = [name for operation, name in seen if operation == "unlink"]
    assert gone == [COMMIT_FILE, MANIFEST_FILE, "rank-00000.safetensors", "rank-00001.safetensors"]


def test_what_a_dead_attempt_left_is_cleared(storage: Storage) -> None:
    write_checkpoint(storage, 90)
    storage.write(f"{step_folder(100)}/rank-00000.safetensors", [b"half"], 4)
    write_checkpoint(storage, 110, commit=False)
    assert list_steps(storage) == [90]
    assert len(tidy(storage)) == 2 and storage.names() == ["quarantine", step_folder(90)]


def test_nothing_is_overwritten(storage: Storage) -> None:
    storage.write("file", [b"old"], 3)
    for write in (lambda: storage.write("file", [b"new"], 3), lambda: storage.commit("file", b"new")):
        with pytest.raises(FileExistsError):
            write()
    assert storage.read("file") == b"old" and storage.read("file", 1, 9) == b"ld" and storage.read("file", 5, 9) == b""
    storage.write("a/x", [b""], 0)
    storage.write("b/x", [b""], 0)
    with pytest.raises(FileExistsError):
        storage.move_folder("a", "b")


def test_another_process_that_writes_there_is_seen(storage: Storage, endpoint: str) -> None:
    assert storage.names() == [] and not storage.exists("file")
    client(endpoint).put_object(Bucket=BUCKET, Key="runs/tiny/file", Body=b"new")
    assert storage.names() == ["file"] and storage.size("file") == 3
    client(endpoint).delete_object(Bucket=BUCKET, Key="runs/tiny/file")
    assert storage.names() == [] and not storage.exists("file")


def test_a_large_object_comes_in_parts_and_appears_whole(
    storage: Storage, endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_object, "ONE_PUT_BYTES", 5 * 2**20)  # the least that S3 takes as a part
    block = bytes(range(256)) * 2**14
    there: list[bool] = []

    def parts(fail: bool) -> Iterator[bytes]:
        for index in range(3):
            yield block
            there.append("runs/tiny/big" in keys(endpoint))
            if fail and index == 2:
                raise RuntimeError("the writer died")

    with pytest.raises(RuntimeError, match="the writer died"):
        storage.write("big", parts(fail=True), 3 * len(block))
    assert client(endpoint).list_multipart_uploads(Bucket=BUCKET).get("Uploads", []) == []
    assert not storage.exists("big") and there == [False] * 3
    with pytest.raises(ValueError, match="announced"):
        storage.write("big", parts(fail=False), 3 * len(block) + 1)
    assert not storage.exists("big")
    storage.write("big", parts(fail=False), 3 * len(block))
    assert storage.read("big") == block * 3 and storage.size("big") == 3 * len(block)
    assert not any(there)
    assert client(endpoint).head_object(Bucket=BUCKET, Key="runs/tiny/big")["ETag"][-3:] in ('-2"', '-3"')


def keys(endpoint: str) -> list[str]:
    return [found["Key"] for found in client(endpoint).list_objects_v2(Bucket=BUCKET).get("Contents", [])]


def test_a_bucket_that_is_not_there_is_named(storage: Storage) -> None:
    elsewhere = open_storage("s3://nosuchbucket/x")
    with pytest.raises(FileNotFoundError) as error:
        elsewhere.write("step-00000001/a", [b"x"], 1)
    told = explain(error.value, elsewhere, "step-00000001/a", 1)
    assert isinstance(told, JobError) and "s3://nosuchbucket/x/step-00000001/a is not there" in told.message
    assert told.hint is not None and "s3://nosuchbucket" in told.hint
    assert list_steps(elsewhere) == []


def test_a_store_that_denies_is_named(storage: Storage, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint(storage, 100)
    iam = client(endpoint, "iam")
    iam.create_user(UserName="stranger")
    key = iam.create_access_key(UserName="stranger")["AccessKey"]
    policy = {"Version": "2012-10-17", "Statement": [{"Effect": "Deny", "Action": "s3:*", "Resource": "*"}]}
    iam.put_user_policy(UserName="stranger", PolicyName="none", PolicyDocument=json.dumps(policy))
    with checked_access(endpoint):
        sign_in(monkeypatch, endpoint, key["AccessKeyId"], key["SecretAccessKey"])
        denied = open_storage(PLACE)
        with pytest.raises(PermissionError) as error:
            denied.write("step-00000110/a", [b"x"], 1)
        told = explain(error.value, denied, "step-00000110/a", 1)
        assert isinstance(told, JobError) and f"the store denies {PLACE}/step-00000110/a" in told.message
        assert told.hint is not None and f"policy of s3://{BUCKET}" in told.hint
        with pytest.raises(JobError, match="the store denies"):
            verify(denied, 100)
    sign_in(monkeypatch, endpoint)
    assert verify(open_storage(PLACE), 100) == []


class checked_access:  # noqa: N801
    """While it lasts, the server checks who asks."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def __enter__(self) -> None:
        self._set(b"0")

    def __exit__(self, *error: object) -> None:
        self._set(b"inf")

    def _set(self, count: bytes) -> None:
        request = urllib.request.Request(f"{self._endpoint}/moto-api/reset-auth", data=count, method="POST")
        request.add_header("Content-Type", "text/plain")
        urllib.request.urlopen(request, timeout=30)


def test_without_credentials_that_is_said(storage: Storage, endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sign_in(monkeypatch, endpoint)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    anonymous = open_storage(PLACE)
    with pytest.raises(Exception, match="credentials") as error:
        anonymous.write("a", [b"x"], 1)
    told = explain(error.value, anonymous, "a")
    assert isinstance(told, JobError) and "needs credentials" in told.message
    assert told.hint is not None and "AWS_ACCESS_KEY_ID" in told.hint


def test_a_store_that_cannot_be_reached_is_named(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    sign_in(monkeypatch, "http://127.0.0.1:9")
    nowhere = open_storage(PLACE)
    nowhere._files.retries = 1  # type: ignore[attr-defined]  # s3fs waits longer with each of five
    with pytest.raises(Exception, match="9") as error:
        nowhere.write("a", [b"x"], 1)
    told = explain(error.value, nowhere, "a")
    assert isinstance(told, JobError) and "cannot reach the store" in told.message
    assert told.hint is not None and "AWS_ENDPOINT_URL" in told.hint


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def absent(place: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", absent)
    with pytest.raises(JobError, match="needs a package") as error:
        open_storage("s3://bucket/x")
    assert error.value.hint is not None and "pip install 'paceline[s3]'" in error.value.hint


@pytest.mark.parametrize("hosts", [1, 2])
def test_ranks_save_into_a_store_and_older_ones_go(storage: Storage, hosts: int) -> None:
    with ranks(PLACE, 2, hosts=hosts, sharded=True, keep=1) as run:
        for step in (1, 2):
            run.save(step)
            run.wait()
            found = {n: t for n, t in saved(storage, step).items() if not n.startswith("buffer/")}
            assert equal(found, odd_tensors())
    assert list_steps(storage) == [2] and ("removed", 1) in run.states
    assert sorted(storage.names(step_folder(2))) == [
        COMMIT_FILE,
        MANIFEST_FILE,
        "rank-00000.safetensors",
        "rank-00001.safetensors",
    ]
