"""A snapshot file says what was captured, or in one line why it cannot be read."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from paceline.doctor import snapshot
from paceline.doctor.check import Given
from paceline.doctor.examine import examine
from paceline.doctor.host import FORMAT
from paceline.doctor.run import judge, read_hosts
from paceline.errors import Unreadable, UsageError
from tests.doctor.hosts import healthy_hosts, with_variables


@pytest.mark.parametrize("kind", healthy_hosts())
def test_a_host_is_read_back_as_it_was(kind: str, tmp_path: Path) -> None:
    host = healthy_hosts()[kind]
    snapshot.write(host, tmp_path / "host.json")
    assert snapshot.read(tmp_path / "host.json") == host
    assert snapshot.decode(snapshot.encode(host), "of rank 1") == host


def test_a_reader_skips_fields_that_it_does_not_know() -> None:
    document = json.loads(snapshot.encode(healthy_hosts()["cpu"]))
    document["host"]["colour"] = "green"
    document["host"]["cpu"]["taste"] = 1
    assert snapshot.decode(json.dumps(document).encode(), "x") == healthy_hosts()["cpu"]


def test_a_newer_snapshot_is_refused_with_both_versions() -> None:
    host = msgspec.structs.replace(healthy_hosts()["cpu"], format=FORMAT + 8)
    with pytest.raises(Unreadable, match=f"format {FORMAT + 8}, this program reads up to {FORMAT}"):
        snapshot.decode(snapshot.encode(host), "node7.json")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is cut short"),
        (b"[1]", "is no snapshot of a host|is no JSON document"),
        (b'{"schema": "paceline.plan/1"}', "is no snapshot of a host"),
        (b'{"schema": "paceline.host/1", "host": {"format": 1}}', "is damaged"),
        (b'{"schema": "paceline.host/1", "host": {"format": 1, "name": "n", "cpu": 3}}', "is damaged"),
        (b"\x00\xff}", "is no JSON document"),
    ],
)
def test_a_damaged_snapshot_is_one_clear_line(content: bytes, says: str) -> None:
    with pytest.raises(Unreadable, match=says) as raised:
        snapshot.decode(content, "node7.json")
    assert "node7.json" in raised.value.message and "\n" not in raised.value.message


def test_a_snapshot_cut_anywhere_is_refused() -> None:
    content = snapshot.encode(healthy_hosts()["h100"])
    for length in range(0, len(content), 97):
        with pytest.raises(Unreadable):
            snapshot.decode(content[:length], "node7.json")


def test_a_file_that_is_not_there_is_a_wrong_command(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        snapshot.read(tmp_path / "nope.json")
    with pytest.raises(UsageError, match="No such file"):
        snapshot.write(healthy_hosts()["cpu"], tmp_path / "nowhere" / "host.json")


def test_the_hosts_that_can_be_read_are_judged_beside_one_that_cannot(tmp_path: Path) -> None:
    host = with_variables(healthy_hosts()["h100"], NCCL_P2P_DISABLE="1")
    snapshot.write(host, tmp_path / "good.json")
    (tmp_path / "cut.json").write_bytes((tmp_path / "good.json").read_bytes()[:500])
    hosts, unreadable = read_hosts([tmp_path / "cut.json", tmp_path / "good.json"])
    found = judge(hosts, None, unreadable)
    assert [f.id for f in found.findings] == ["snapshot", "variables"]
    assert found.findings[0].host == "cut.json" and "is cut short" in found.findings[0].found
    assert [f.found for f in examine(Given(hosts=tuple(hosts))).findings] == [found.findings[1].found]


def test_nothing_that_can_be_read_is_still_an_answer(tmp_path: Path) -> None:
    (tmp_path / "cut.json").write_text("{")
    hosts, unreadable = read_hosts([tmp_path / "cut.json"])
    assert judge(hosts, None, unreadable).document()["findings"][0]["id"] == "snapshot"


def test_two_captured_hosts_of_one_name_are_two_hosts(tmp_path: Path) -> None:
    """Containers of one image often share a name."""
    for name in ("a", "b"):
        snapshot.write(healthy_hosts()["cpu"], tmp_path / f"{name}.json")
    hosts, _ = read_hosts([tmp_path / "a.json", tmp_path / "b.json"])
    assert [host.name for host in hosts] == ["cpu1", "cpu1 (b)"]
    assert judge(hosts, None).hosts == ("cpu1", "cpu1 (b)")
