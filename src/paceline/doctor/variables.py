"""The table of environment variables, and what in it a host's environment matches. Imports no torch."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec

from paceline.doctor.check import Given, Severity
from paceline.doctor.host import Host
from paceline.units import format_bandwidth

TABLE = Path(__file__).with_name("variables.toml")

CAPTURED = (
    "NCCL_", "RCCL_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "GLOO_", "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_",
    "CUDA_", "NVIDIA_", "HIP_", "ROCR_", "HSA_", "FI_", "OFI_", "UCX_", "SLURM_JOB_", "PET_", "MASTER_", "GROUP_",
)  # fmt: skip
"""What a snapshot keeps of the environment, by prefix; nothing that holds a secret."""

EFFECTS = (
    "NCCL_", "RCCL_", "TORCH_NCCL_", "TORCH_GLOO_", "TORCH_DISTRIBUTED_", "TORCH_FR_", "PYTORCH_CUDA_ALLOC", "PYTORCH_ALLOC",
    "PYTORCH_NO_", "GLOO_", "OMP_", "MKL_", "KMP_", "CUDA_LAUNCH_", "CUDA_DEVICE_", "CUDA_MODULE_", "HSA_", "FI_",
    "NVIDIA_TF32_",
)  # fmt: skip
"""Variables that must be equal on all hosts. Others of the same libraries name versions and places."""

NAMING_FILES = ("NCCL_TOPO_FILE", "NCCL_CONF_FILE")


class Wrong(msgspec.Struct, frozen=True, kw_only=True, rename={"is_": "is"}, forbid_unknown_fields=True):
    """What a value must be to be wrong; the table's head says what each key means."""

    any: bool = False
    is_: tuple[str, ...] | None = None
    is_not: tuple[str, ...] | None = None
    matches: str | None = None
    not_matches: str | None = None
    below: float | None = None
    above: float | None = None
    below_variable: tuple[str, float] | None = None
    options_beyond: str | None = None
    file: str | None = None
    unless: tuple[str, ...] = ()
    where: str | None = None


class Rule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One wrong value of one variable."""

    name: str
    wrong: Wrong
    severity: Severity
    why: str
    source: str
    mend: str = ""
    evidence: str = ""
    said: str = ""


class Table(msgspec.Struct, frozen=True):
    lists: dict[str, tuple[str, ...]]
    variable: tuple[Rule, ...]


@cache
def table() -> Table:
    """The table as data."""
    return msgspec.convert(tomllib.loads(TABLE.read_text(encoding="utf-8")), Table)


def matching(host: Host, given: Given) -> Iterator[Rule]:
    """Rules that a host's environment breaks; for each variable at most the first of the table."""
    seen: set[str] = set()
    for rule in table().variable:
        value = host.environment.get(rule.name)
        if value is not None and rule.name not in seen and _holds(rule, value.strip(), host, given):
            seen.add(rule.name)
            yield rule


def evidence(rule: Rule, host: Host) -> str:
    """What this host adds to a rule, or nothing."""
    if rule.evidence == "fabric":
        return _fabric_evidence(host)
    if rule.evidence == "nvlink" and host.gpus:
        links = [gpu.nvlink for gpu in host.gpus if gpu.nvlink is not None and gpu.nvlink.active]
        if links:
            return f"{len(links)} GPUs here have {links[0].active} NVLinks each"
    return ""


def _fabric_evidence(host: Host) -> str:
    """Rates of the RDMA ports that go unused, against the interface that is used in their place."""
    ports = host.fabric()
    if not ports:
        return ""
    best = max(port.rate for port in ports)
    kinds = "/".join(sorted({"RoCE" if p.link == "Ethernet" else p.link for p in ports}))
    text = f"{len(ports)} active {kinds} port{'s' * (len(ports) > 1)} of {format_bandwidth(best / 8)} each go unused"
    speeds = [i.speed for i in host.networks() if i.speed and i.name not in {p.interface for p in ports}]
    if speeds:
        text += f", IP goes at {format_bandwidth(max(speeds) / 8)}"
    return text


def _holds(rule: Rule, value: str, host: Host, given: Given) -> bool:
    wrong = rule.wrong
    if any(host.environment.get(name) for name in wrong.unless):
        return False
    if wrong.where is not None and not PLACES[wrong.where](host, given):
        return False
    return all(test(value) for test in _tests(rule, host.environment, host.files))


def _tests(rule: Rule, env: Mapping[str, str], files: Mapping[str, bool]) -> Iterator[Callable[[str], bool]]:
    wrong = rule.wrong
    if (values := wrong.is_) is not None:
        yield lambda value: value.lower() in {v.lower() for v in values}
    if (allowed := wrong.is_not) is not None:
        yield lambda value: value.lower() not in {v.lower() for v in allowed}
    if (pattern := wrong.matches) is not None:
        yield lambda value: re.fullmatch(pattern, value, re.I) is not None
    if (form := wrong.not_matches) is not None:
        yield lambda value: re.fullmatch(form, value, re.I) is None
    if (floor := wrong.below) is not None:
        yield lambda value: (number := _number(value)) is not None and number < floor
    if (ceiling := wrong.above) is not None:
        yield lambda value: (number := _number(value)) is not None and number > ceiling
    if (other := wrong.below_variable) is not None:
        limit = _number(env.get(other[0], "")) or other[1]
        yield lambda value: (number := _number(value)) is not None and number < limit
    if (options := wrong.options_beyond) is not None:
        yield lambda value: bool(_option_names(value) - set(table().lists[options]))
    if wrong.file == "missing":
        yield lambda value: files.get(rule.name) is False


def _option_names(value: str) -> set[str]:
    """Names of `a:1,b:[x:1,y:2],c:True`."""
    flat = re.sub(r"\[[^\]]*\]", "", value)
    return {part.partition(":")[0].strip() for part in flat.split(",") if part.strip()}


def _number(value: str) -> float | None:
    try:
        return float(value)
    except ValueError:
        return None


def _names(host: Host, text: str) -> bool:
    return any(text in gpu.name.lower() for gpu in host.gpus)


PLACES: dict[str, Callable[[Host, Given], bool]] = {
    "rdma": lambda host, given: bool(host.rdma),
    "infiniband": lambda host, given: any(p.link == "InfiniBand" for p in host.rdma),
    "efa": lambda host, given: any(p.driver == "efa" for p in host.rdma),
    "gpus": lambda host, given: bool(host.gpus),
    "nvlink": lambda host, given: any(gpu.nvlink and gpu.nvlink.links for gpu in host.gpus),
    "mi300": lambda host, given: _names(host, "mi300"),
    "no_roce": lambda host, given: not any(p.link == "Ethernet" and p.driver != "efa" for p in host.rdma),
    "no_amd": lambda host, given: not any(gpu.vendor == "amd" for gpu in host.gpus),
    "rails": lambda host, given: len(host.gpus) > 1 and len(host.fabric()) >= len(host.gpus),
    "virtual": lambda host, given: host.virtual,
    "bare_metal": lambda host, given: bool(host.gpus) and not host.virtual,
    "several_ranks": lambda host, given: given.local_ranks(host) > 1,
}
"""Hosts on which a rule of the table applies."""
