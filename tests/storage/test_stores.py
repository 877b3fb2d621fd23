"""What S3 and HDFS answer when something is wrong: on the real servers, and through a proxy that cuts, delays and rejects."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import fsspec
import pytest
from botocore.retries.standard import ExponentialBackoff
from tests.faults.proxy import Proxy, Trouble, What, proxied
from tests.services.fixtures import use_s3
from tests.services.hdfs import Hdfs
from tests.services.s3 import S3
from tests.waiting import until

from fordstone.connectors import files
from fordstone.connectors.base import SinkStream
from fordstone.connectors.registry import open_sink
from fordstone.errors import ConfigError
from fordstone.lang.schema import Schema
from fordstone.storage.remote import FsspecRemote, StoreAwayError, limits, open_filesystem, open_remote

BODY = b'<?xml version="1.0" encoding="UTF-8"?><Error><Code>%s</Code><Message>Please reduce your request rate.</Message></Error>'


def rejection(code: bytes) -> bytes:
    body = BODY % code
    head = b"HTTP/1.1 503 Slow Down\r\nContent-Type: application/xml\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % len(body) + body


@pytest.fixture(name="proxy")
def proxy_fixture(s3: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A proxy in front of S3, which the environment names."""
    with proxied(s3.port) as proxy:
        use_s3(s3, monkeypatch, proxy.url)
        yield proxy


@pytest.mark.parametrize("code", [b"SlowDown", b"ServiceUnavailable"])
def test_a_request_that_is_rejected_for_now_is_repeated_for_a_while(
    proxy: Proxy, s3: S3, code: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The number of attempts is what is tested. The driver's waits between them add up to ten seconds.
    monkeypatch.setattr(ExponentialBackoff, "delay_amount", lambda *_: 0.01)
    remote = open_remote(f"s3://{s3.bucket()}/p")
    busy = Trouble(what="answer", where="^PUT .*/p/a", answer=rejection(code), times=2)
    proxy.troubles = [busy]
    remote.put("a", b"1")
    assert remote.get("a") == b"1"
    assert busy.happened == 2
    proxy.troubles = [Trouble(what="answer", where="^PUT .*/p/b", answer=rejection(code), times=1000)]
    with pytest.raises(StoreAwayError, match=r"could not write s3://bucket\d+/p/b: .*reduce your request rate"):
        remote.put("b", b"1")
    assert 3 <= proxy.happened()["answer"] <= 12, "the number of attempts has a bound"
    assert remote.sizes("") == {"a": 1}


@pytest.mark.parametrize("what", ["cut_request", "cut_answer", "lose_answer", "refuse", "delay", "twice"])
def test_a_broken_connection_leaves_the_whole_file_or_the_older_one(proxy: Proxy, s3: S3, what: What) -> None:
    remote = open_remote(f"s3://{s3.bucket()}/p")
    remote.put("a", b"older" * 1000)
    once = Trouble(what=what, where="^PUT ")
    proxy.troubles = [once]
    remote.put("a", b"newer" * 2000)
    assert once.happened == 1
    reading = Trouble(what=what, where="^GET .*/p/a")
    proxy.troubles = [reading]
    assert remote.get("a") == b"newer" * 2000
    assert reading.happened == 1


@pytest.mark.parametrize("what", ["lose_answer", "twice", "cut_answer"])
def test_who_created_a_file_finds_its_own_although_the_answer_was_lost(proxy: Proxy, s3: S3, what: What) -> None:
    remote = open_remote(f"s3://{s3.bucket()}/p")
    once = Trouble(what=what, where="^PUT ")
    proxy.troubles = [once]
    assert remote.create("id", b"mine")
    assert once.happened == 1
    assert not remote.create("id", b"other")


def test_of_many_that_create_a_file_at_the_same_time_one_does(store_url: str) -> None:
    count = 8
    together, created = threading.Barrier(count), list[int]()

    def create(number: int) -> None:
        remote = open_remote(store_url)
        together.wait()
        if remote.create("id", str(number).encode()):
            created.append(number)

    threads = [threading.Thread(target=create, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (winner,) = created
    assert open_remote(store_url).get("id") == str(winner).encode()
    assert open_remote(store_url).sizes("") == {"id": 1}


def test_a_file_that_another_process_wrote_is_there_although_the_directory_was_listed_before(store_url: str) -> None:
    one: Any = open_remote(store_url)
    other = FsspecRemote(*_again(one))
    one.put("p/a", b"1")
    assert one.sizes("p") == {"a": 1}
    other.put("p/b", b"2")
    assert one.get("p/b") == b"2"
    assert one.exists("p/b")


def _again(remote: Any) -> tuple[Any, str]:
    """The same store through a driver of its own."""
    filesystem = remote._fs
    options = dict(filesystem.storage_options) | {"skip_instance_cache": True}
    return type(filesystem)(*filesystem.storage_args, **options), remote._root


def test_leftovers_of_a_killed_process_are_hidden_and_removed(store_url: str) -> None:
    """An upload in parts that has not ended; a file under a temporary name that is not closed."""
    filesystem, root = open_filesystem(store_url, kind="files")
    remote = FsspecRemote(filesystem, f"{root}/p")
    remote.put("d/whole", b"1")
    if store_url.startswith("s3"):
        bucket = root.strip("/")
        begun = filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key="p/d/half")["UploadId"]
        elsewhere = filesystem.call_s3("create_multipart_upload", Bucket=bucket, Key="q/half")["UploadId"]
        assert {upload["UploadId"] for upload in filesystem.list_multipart_uploads(bucket)} == {begun, elsewhere}
    else:
        half = filesystem.open(f"{root}/p/d/.tmp-0-half", "wb")
        half.write(b"ha")
    assert remote.sizes("d") == {"whole": 1}
    remote.remove_leftovers("d")
    if store_url.startswith("s3"):
        assert [upload["UploadId"] for upload in filesystem.list_multipart_uploads(bucket)] == [elsewhere]
    else:
        assert [name.rpartition("/")[2] for name in filesystem.ls(f"{root}/p/d", detail=False)] == ["whole"]
    assert remote.get("d/whole") == b"1"


def test_leftovers_that_may_not_be_removed_stop_nothing(proxy: Proxy, s3: S3, caplog: pytest.LogCaptureFixture) -> None:
    denied = rejection(b"AccessDenied").replace(b"503 Slow Down", b"403 Forbidden")
    proxy.troubles = [Trouble(what="answer", where="^GET .*uploads", answer=denied, times=100)]
    remote = open_remote(f"s3://{s3.bucket()}/p")
    with caplog.at_level(logging.WARNING):
        remote.remove_leftovers("d")
    assert "unfinished uploads not removed" in caplog.text
    remote.put("d/a", b"1")


WRONG = {
    "secret": (
        {"AWS_SECRET_ACCESS_KEY": "wrong"},
        "Check the credentials[:,] (the secret key does not belong to the key id|and what they may do)",
    ),
    "key id": ({"AWS_ACCESS_KEY_ID": "nobody"}, "Check the credentials: the store does not have this key id"),
    "none": (
        {"AWS_ACCESS_KEY_ID": None, "AWS_SECRET_ACCESS_KEY": None, "AWS_EC2_METADATA_DISABLED": "true"},
        "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    ),
}


@pytest.mark.parametrize(("environment", "advice"), WRONG.values(), ids=WRONG)
def test_wrong_credentials_are_an_error_that_says_what_to_set(
    s3_url: str, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str | None], advice: str
) -> None:
    for name, value in environment.items():
        monkeypatch.delenv(name, raising=False) if value is None else monkeypatch.setenv(name, value)
    remote = open_remote(s3_url)
    for call in (lambda: remote.put("a", b"1"), lambda: remote.get("a"), lambda: remote.sizes("p")):
        with pytest.raises(StoreAwayError, match=advice):
            call()


@pytest.mark.usefixtures("s3_url")
def test_a_bucket_that_does_not_exist_is_not_an_empty_store() -> None:
    remote = open_remote("s3://misspelt/copies")
    calls: list[Callable[[], object]] = [
        lambda: remote.sizes("p"),
        lambda: remote.get("p/a"),
        lambda: remote.put("p/a", b"1"),
        lambda: remote.create("p/a", b"1"),
    ]
    for call in calls:
        with pytest.raises(StoreAwayError, match=r"bucket does not exist\.\nCreate the bucket, or correct the URL"):
            call()


def test_a_name_node_in_safe_mode_is_an_error_that_says_so(hdfs: Hdfs, hdfs_url: str) -> None:
    remote = open_remote(hdfs_url)
    remote.put("a", b"older")
    hdfs.admin("-safemode", "enter")
    try:
        with pytest.raises(
            StoreAwayError, match=rf"could not write {hdfs_url}/a: .*safe mode\.\nThe NameNode takes no"
        ):
            remote.put("a", b"newer")
        assert remote.get("a") == b"older"
    finally:
        hdfs.admin("-safemode", "leave")
    remote.put("a", b"newer")
    assert remote.get("a") == b"newer"


def test_a_user_without_permission_is_an_error_that_says_so(hdfs_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_remote(hdfs_url).put("a", b"1")
    monkeypatch.setenv("HADOOP_USER_NAME", "mallory")
    fsspec.get_filesystem_class("hdfs").clear_instance_cache()
    try:
        with pytest.raises(StoreAwayError, match=r"Permission denied: user=mallory.*\nCheck the owner") as raised:
            open_remote(hdfs_url).put("a", b"2")
        assert "\tat " not in str(raised.value)
    finally:
        fsspec.get_filesystem_class("hdfs").clear_instance_cache()


def test_a_server_that_answers_nothing_is_given_up(
    hdfs: Hdfs, hdfs_url: str, s3: S3, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both drivers would wait for as long as the server is paused: HDFS always, S3 for a file that does not fit into the buffers."""
    for server, url in ((hdfs.name_node, hdfs_url), (s3, s3_url)):
        remote = open_remote(url)
        remote.put("a", b"1")
        with monkeypatch.context() as patch, server.paused():
            patch.setattr(limits, "REQUEST_TIMEOUT_S", 0.5)
            patch.setattr(limits, "BYTES_PER_S_MIN", 1 << 30)
            with pytest.raises(StoreAwayError, match="no response within"):
                remote.put("a", b"2" * (8 << 20))
        until(lambda remote=remote: _answers(remote), "an answer")  # type: ignore[misc]
        assert remote.get("a")[:1] in {b"1", b"2"}


def _answers(remote: Any) -> bool:
    try:
        return bool(remote.sizes(""))
    except StoreAwayError:
        return False


def test_what_takes_too_long_is_left_to_itself() -> None:
    never = threading.Event()
    with pytest.raises(TimeoutError, match="no response within 0 s"):
        limits.limited(never.wait, 0.01)
    never.set()


@pytest.mark.parametrize("scheme", ["webhdfs", "swebhdfs"])
def test_a_store_that_cannot_replace_files_is_refused_for_commits(scheme: str) -> None:
    url = f"{scheme}://name:9870/x"
    stream = SinkStream(step="s", schema=Schema.of({"n": "bigint"}))
    for call in (lambda: open_remote(url), lambda: open_sink(files(url, format="jsonl"), stream)):
        with pytest.raises(
            ConfigError, match=r"Use hdfs://name:9870/x with the port of .* pip install 'fordstone\[hdfs\]'"
        ):
            call()


FORKS: Final = """
import os, signal, sys
from fordstone.storage.remote import open_remote

open_remote(sys.argv[1]).put("a", b"1")
child = os.fork()
if child == 0:
    os._exit(0)
signal.signal(signal.SIGALRM, lambda *_: os.kill(child, signal.SIGKILL))
signal.alarm(20)  # what the child waits for does not come
print(os.waitpid(child, 0)[1])
"""


def test_a_process_that_uses_a_store_can_be_forked(store_url: str, tmp_path: Path) -> None:
    """As `subprocess` does with `preexec_fn`, and `multiprocessing`."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, store_url], capture_output=True, text=True, check=False, start_new_session=True
    )
    assert (done.returncode, done.stdout) == (0, "0\n"), done.stderr
