"""`fordstone hub` and `fordstone hub token` as a person types them."""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click import Context
from click.testing import CliRunner, Result

from fordstone.cli.hub import LIMIT_OPTIONS, LOG_LIMIT_OPTIONS, hub
from fordstone.cli.main import cli
from fordstone.hub.server.auth import TokenFile
from fordstone.hub.server.limits import Limits
from fordstone.hub.server.serve import HubOptions
from fordstone.hub.store.log import LogLimits
from fordstone.hub.store.scrub import RATE_BYTES

Invoke = Callable[..., Result]


@pytest.fixture
def invoke(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Invoke:
    monkeypatch.chdir(tmp_path)
    return lambda *args: CliRunner().invoke(cli, ["hub", *args], prog_name="fordstone")


@pytest.mark.parametrize("command", [[], ["token"], ["token", "add"], ["token", "revoke"], ["token", "ls"]])
def test_help_teaches_with_examples_and_exit_codes(invoke, command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Examples:\n  fordstone hub" in result.stdout
    assert "Exit codes: 0 finished or stopped cleanly" in result.stdout


def test_there_is_no_switch_that_turns_tls_or_tokens_off(invoke):
    assert "insecure" not in invoke("--help").stdout
    assert invoke("--insecure-no-tls").exit_code == 2


def test_a_token_is_printed_once_alone_on_stdout(invoke):
    result = invoke("token", "add", "truck-7", "--node", "truck-7", "--pipeline", "a", "--pipeline", "b")
    assert result.exit_code == 0
    text = result.stdout.strip()
    assert text.startswith("fst_")
    assert len(result.stdout.splitlines()) == 1
    assert "only its hash" in result.stderr
    listed = invoke("token", "ls", "--json").stdout
    assert text not in listed
    one = json.loads(listed)
    assert (one["name"], one["role"], one["node"], one["pipelines"]) == ("truck-7", "node", "truck-7", ["a", "b"])
    assert one["revoked_us"] is None
    assert "sha256" not in one


def test_a_token_goes_to_a_new_file_that_only_its_owner_can_read(invoke, tmp_path):
    before = os.umask(0)
    try:
        result = invoke("token", "add", "truck-7", "--node", "truck-7", "--out", "truck-7.token")
    finally:
        os.umask(before)
    file = tmp_path / "truck-7.token"
    text = file.read_text()
    assert (result.exit_code, stat.S_IMODE(file.stat().st_mode)) == (0, 0o600)
    assert text.startswith("fst_")
    assert text.strip() not in result.output
    again = invoke("token", "add", "other", "--center", "--out", "truck-7.token")
    assert (again.exit_code, "is not overwritten" in again.stderr) == (2, True)
    assert file.read_text() == text
    assert [one.name for one in TokenFile(tmp_path / "hub").read()] == ["truck-7"], "no token is made that nobody has"


@pytest.mark.parametrize("wrong", [("truck-7", "--out", "new.token"), ("b", "--out", "no-such-folder/b.token")])
def test_a_token_that_cannot_be_made_or_written_leaves_no_file_and_no_token(invoke, tmp_path, wrong):
    invoke("token", "add", "truck-7", "--center")
    result = invoke("token", "add", *wrong, "--center")
    assert (result.exit_code, "Traceback" in result.output) == (2, False)
    assert not (tmp_path / "new.token").exists()
    assert [one.name for one in TokenFile(tmp_path / "hub").read()] == ["truck-7"]


def test_the_data_directory_may_be_named_before_or_after_token(invoke):
    assert invoke("--data", "one", "token", "add", "t", "--center").exit_code == 0
    assert invoke("token", "add", "t", "--center", "--data", "two").exit_code == 0
    assert [len(TokenFile(name).read()) for name in ("one", "two", "hub")] == [1, 1, 0]


@pytest.mark.parametrize(
    "args",
    [(), ("--center", "--admin"), ("--node", "n", "--center"), ("--admin", "--pipeline", "p"), ("--node", "../x")],
)
def test_a_token_is_for_exactly_one_role(invoke, args):
    result = invoke("token", "add", "t", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert TokenFile("hub").read() == ()


def test_a_name_that_is_taken_is_reported_with_the_way_out(invoke):
    assert invoke("token", "add", "t", "--admin").exit_code == 0
    result = invoke("token", "add", "t", "--admin")
    assert result.exit_code == 2
    assert "fordstone hub token revoke t" in result.stderr


def test_revoked_tokens_are_listed_as_such(invoke):
    invoke("token", "add", "t", "--center")
    assert invoke("token", "revoke", "t").stdout == "revoked t.\n"
    assert "revoked" in invoke("token", "ls").stdout
    missing = invoke("token", "revoke", "nobody")
    assert missing.exit_code == 2
    assert "there is no token 'nobody'" in missing.stderr


def test_a_list_without_tokens_says_what_that_means(invoke):
    assert "the hub accepts every request" in invoke("token", "ls").stdout


def test_the_list_says_for_whom_and_when(invoke):
    invoke("token", "add", "truck-7", "--node", "truck-7", "--pipeline", "cold-chain")
    invoke("token", "add", "ops", "--admin")
    TokenFile("hub").write_used({"ops": 1_700_000_000_000_000})
    head, truck, ops = invoke("token", "ls").stdout.splitlines()
    assert head.split()[:3] == ["name", "role", "pipelines"]
    assert "node truck-7" in truck
    assert "cold-chain" in truck
    assert "never" in truck
    assert "2023-11-14" in ops


@pytest.mark.parametrize(
    "args",
    [
        ("--listen", "nonsense"),
        ("--rate", "0"),
        ("--blob-max", "0"),
        ("--body-max", "99999999999"),
        ("--keep-unread", "soon"),
        ("--tls-cert", "x"),
        ("--listen", "192.0.2.1:1"),
        ("--blobs", "nonsense://x"),
    ],
)
def test_options_that_make_no_sense_are_refused_in_words(invoke, args):
    result = invoke("--listen", "127.0.0.1:0", *args)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "Traceback" not in result.stderr


def test_a_data_directory_that_is_a_file_is_reported(invoke, tmp_path):
    (tmp_path / "hub").write_text("")
    for result in (invoke("--listen", "127.0.0.1:0"), invoke("token", "add", "t", "--admin")):
        assert result.exit_code in {1, 2}
        assert result.stderr.startswith("error: ")


def test_a_missing_web_server_is_reported_with_the_way_to_get_it(invoke, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "fordstone.hub.server.serve")
    result = invoke()
    assert result.exit_code == 1
    assert "fordstone[hub]" in result.stderr


def test_the_defaults_of_the_options_are_those_of_a_hub_in_python() -> None:
    defaults = {option.name: option.default for option in hub.params}
    for names, limits in ((LIMIT_OPTIONS, Limits()), (LOG_LIMIT_OPTIONS, LogLimits())):
        assert {name: defaults[name] for name in names} == {name: getattr(limits, name) for name in names}
    plain = HubOptions()
    assert (defaults["listen"], defaults["data"]) == (plain.listen, str(plain.data))
    with Context(hub) as context:
        assert f"{RATE_BYTES}; blobs at --blobs" in " ".join(hub.get_help(context).split())
