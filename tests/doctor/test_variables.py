"""The table of variables: each row catches its wrong value, and leaves right ones alone."""

from __future__ import annotations

import re

import pytest

from paceline.doctor.check import Given
from paceline.doctor.checks import variables_unknown
from paceline.doctor.host import Host
from paceline.doctor.variables import PLACES, Rule, Wrong, matching, table
from tests.doctor.hosts import change, cpu_host, efa_host, h100_host, healthy_hosts, mi300_host

RULES = table().variable
PLACED: dict[str, Host] = {"efa": efa_host(), "mi300": mi300_host(), "virtual": efa_host(), "no_roce": cpu_host()}

RIGHT = {
    "NCCL_IB_DISABLE": ("0",),
    "NCCL_NET": ("IB", "AWS Libfabric"),
    "NCCL_P2P_LEVEL": ("SYS", "nvl"),
    "NCCL_NET_GDR_LEVEL": ("PHB",),
    "NCCL_PROTO": ("^LL128",),
    "NCCL_ALGO": ("^tree", "allreduce:^tree"),
    "NCCL_BUFFSIZE": ("4194304",),
    "NCCL_CROSS_NIC": ("0", "2"),
    "NCCL_NVLS_ENABLE": ("1", "2"),
    "NCCL_IB_TIMEOUT": ("20", "22"),
    "NCCL_IB_RETRY_CNT": ("7",),
    "NCCL_IB_TC": ("106",),
    "NCCL_IB_GID_INDEX": ("-1",),
    "NCCL_IB_QPS_PER_CONNECTION": ("4",),
    "NCCL_MAX_CTAS": ("16",),
    "NCCL_DEBUG": ("WARN", "VERSION"),
    "NCCL_DEBUG_FILE": ("/tmp/nccl.%h.%p", "/dev/stderr"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("3", "1"),
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": ("480", "1800"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO"),
    "PYTORCH_CUDA_ALLOC_CONF": (
        "expandable_segments:True",
        "backend:cudaMallocAsync",
        "roundup_power2_divisions:[256:1,512:2,1024:4,>:8],garbage_collection_threshold:0.8",
        "max_split_size_mb:512",
    ),
    "CUDA_DEVICE_MAX_CONNECTIONS": ("8",),
    "OMP_NUM_THREADS": ("4", "4,2"),
    "GLOO_DEVICE_TRANSPORT": ("TCP",),
    "KMP_BLOCKTIME": ("1",),
}


def _broken(host: Host, name: str, value: str, **others: str) -> list[Rule]:
    return list(matching(change(host, environment={name: value, **others}), Given(hosts=(host,))))


def _wrong_value(wrong: Wrong) -> str:
    """A value that a row must catch."""
    if wrong.is_ is not None:
        return wrong.is_[0]
    if wrong.is_not is not None or wrong.any:
        return "1" if "1" not in (wrong.is_not or ()) else "nonsense"
    if wrong.above is not None:
        return str(int(wrong.above) + 1)
    if wrong.below is not None:
        return str(int(wrong.below) - 1)
    if wrong.below_variable is not None:
        return str(int(wrong.below_variable[1]) - 1)
    if wrong.options_beyond is not None:
        return "expandable_segmets:True"
    if wrong.file is not None:
        return "/nowhere/file"
    for value in EXAMPLES:
        if wrong.matches is not None and re.fullmatch(wrong.matches, value, re.I):
            return value
        if wrong.not_matches is not None and not re.fullmatch(wrong.not_matches, value, re.I):
            return value
    raise AssertionError(f"no example for {wrong}")


EXAMPLES = (
    "LL128",
    "ring,LL128",
    "Simple",
    "4",
    "ring",
    "0",
    "DEBUG_LOCAL",
    "max_split_size_mb:64",
    "/tmp/nccl.log",
    "many",
    "Tring",
)


@pytest.mark.parametrize("rule", RULES, ids=[f"{n}-{r.name}" for n, r in enumerate(RULES)])
def test_a_row_catches_a_wrong_value_and_says_what_mends_it(rule: Rule) -> None:
    host = PLACED.get(rule.wrong.where or "", h100_host() if rule.wrong.where else cpu_host())
    value = _wrong_value(rule.wrong)
    files = {rule.name: False} if rule.wrong.file else {rule.name: True}
    host = change(host, environment={rule.name: value}, files=files)
    found = list(matching(host, Given(hosts=(host,))))
    assert found and found[0].name == rule.name, value
    # A row behind another one of the same variable is reached by some value; each value is reported once.
    assert len(found) == 1
    assert re.search(r"\d", rule.why) and rule.source


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in RIGHT.items() for v in values])
def test_a_right_value_is_left_alone(name: str, value: str) -> None:
    for host in (cpu_host(), h100_host()):
        assert _broken(host, name, value) == []


def test_the_truth_table_is_there() -> None:
    """The variables that the guide of operations lists; those left out have a check of their own."""
    rows = {rule.name for rule in RULES}
    assert rows >= {
        "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE",
        "NCCL_NET_GDR_LEVEL", "NCCL_ALGO", "NCCL_PROTO", "NCCL_BUFFSIZE", "NCCL_CROSS_NIC", "NCCL_NVLS_ENABLE",
        "NCCL_IB_TIMEOUT", "NCCL_IB_RETRY_CNT", "NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_TC", "NCCL_MAX_NCHANNELS",
        "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_TOPO_FILE", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "TORCH_NCCL_BLOCKING_WAIT",
        "TORCH_DISTRIBUTED_DEBUG", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "OMP_NUM_THREADS",
        "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS", "GLOO_DEVICE_TRANSPORT",
    }  # fmt: skip


def test_variables_are_judged_without_a_device() -> None:
    host = change(cpu_host(cpus=2), environment={"NCCL_IB_DISABLE": "1", "NCCL_PROTO": "LL128"})
    assert [r.name for r in matching(host, Given(hosts=(host,)))] == ["NCCL_IB_DISABLE", "NCCL_PROTO"]


def test_a_value_that_depends_on_another_variable() -> None:
    assert _broken(h100_host(), "NCCL_BUFFSIZE", "65536") == []
    assert [r.name for r in _broken(h100_host(), "NCCL_BUFFSIZE", "65536", NCCL_IB_AR_THRESHOLD="1000000")] == [
        "NCCL_BUFFSIZE"
    ]
    assert _broken(h100_host(), "NCCL_DEBUG", "INFO", NCCL_DEBUG_FILE="/tmp/nccl.%h.%p") == []
    assert _broken(h100_host(), "TORCH_NCCL_DUMP_ON_TIMEOUT", "1", TORCH_FR_BUFFER_SIZE="2000") == []


def test_every_place_of_the_table_is_one_and_is_used() -> None:
    assert {rule.wrong.where for rule in RULES if rule.wrong.where} == set(PLACES) - {"gpus"} | (
        {"gpus"} & {rule.wrong.where for rule in RULES}
    )


def test_every_variable_of_a_rule_is_a_name_that_is_read() -> None:
    prefixes = ("NCCL_", "TORCH_", "GLOO_", "PYTORCH_", "OMP_", "MKL_", "KMP_")
    assert {r.name for r in RULES if r.name.startswith(prefixes)} <= set(table().lists["known"])


@pytest.mark.parametrize(
    "name", ["NCCL_FASTRAK_NUM_FLOWS", "NCCL_MIN_P2P_NCHANNELS", "TORCH_HOME", "NCCL_IB_SL", "NCCL_IB_TC"]
)
def test_a_name_of_its_own_is_no_slip(name: str) -> None:
    host = change(cpu_host(), environment={name: "1"})
    assert list(variables_unknown.look(host, Given(hosts=(host,)))) == []


def test_no_healthy_host_breaks_a_rule() -> None:
    for kind, host in healthy_hosts().items():
        assert list(matching(host, Given(hosts=(host,)))) == [], kind
