"""What `doctor --measure` can time on a host, and what it cannot and why. Imports no torch."""

from __future__ import annotations

import os

import msgspec

from paceline.doctor.check import Given, NotChecked
from paceline.doctor.host import Host
from paceline.doctor.variables import matching
from paceline.workers import affinity

PROCS = 2

SEEN_ON_CPU = ("OMP_", "MKL_", "KMP_", "GOMP_", "GLOO_", "TORCH_DISTRIBUTED_DEBUG")
SEEN_ON_GPUS = ("NCCL_", "TORCH_NCCL_", "CUDA_", "HSA_", "FI_")


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """One setting of a trial: variables (None removes one) and CPUs."""

    label: str
    variables: dict[str, str | None] = {}
    pin: bool = False
    shows: str = ""
    """What a rank must report for the setting to have taken effect; nothing where that cannot be seen."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A setting as it is (or as it would be without a launcher), and as it should be."""

    name: str
    a: Side
    b: Side
    on_gpus: bool = False
    """Whether the ranks work on GPUs; else on the processor, whatever there is."""
    reports: str
    """The figure of a rank that shows the setting: threads, cpus, addresses or debug."""


def trials(host: Host) -> tuple[list[Trial], list[NotChecked]]:
    """What can be measured on a host: its wrong variables, then threads, pinning and Gloo's interface; and what cannot."""
    found: list[Trial] = []
    left: list[NotChecked] = []
    for rule in matching(host, Given(hosts=(host,))):
        gpus = rule.name.startswith(SEEN_ON_GPUS)
        if gpus and len(host.gpus) < PROCS:
            left.append(_left(host, rule.name, "nothing here reads it: that takes two GPUs"))
        elif not gpus and not rule.name.startswith(SEEN_ON_CPU):
            left.append(_left(host, rule.name, "no step that is timed here depends on it"))
        elif rule.name != "OMP_NUM_THREADS":
            found.append(_variable(rule.name, host.environment[rule.name], gpus))
    found.append(_threads(host))
    if len(affinity.allowed_cpus()) >= PROCS:
        found.append(_pinning(len(affinity.allowed_cpus())))
    interface = _interface(host)
    if isinstance(interface, Trial):
        found.append(interface)
    else:
        left.append(_left(host, "GLOO_SOCKET_IFNAME", interface))
    return found, left


def _left(host: Host, name: str, reason: str) -> NotChecked:
    return NotChecked(id=f"measure {name}", host=host.name, reason=reason)


def _variable(name: str, value: str, on_gpus: bool) -> Trial:
    debug = name == "TORCH_DISTRIBUTED_DEBUG"
    return Trial(
        name=name,
        a=Side(label=f"{name}={value}", variables={name: value}, shows=value.upper() if debug else ""),
        b=Side(label="unset", variables={name: None}),
        on_gpus=on_gpus,
        reports="debug" if debug else "",
    )


def _threads(host: Host) -> Trial:
    usable = host.cpu.usable if host.cpu else os.cpu_count() or 1
    share = max(1, usable // PROCS)
    given = host.environment.get("OMP_NUM_THREADS", "").split(",")[0]
    wrong = given if given.isdigit() and int(given) != share else str(max(2, usable))
    # Half the machine's cores and more a rank is what an unset variable gives outside a launcher.
    return Trial(
        name="OMP_NUM_THREADS",
        a=Side(label=f"{wrong} threads a rank", variables={"OMP_NUM_THREADS": wrong}, shows=wrong),
        b=Side(label=f"{share} a rank", variables={"OMP_NUM_THREADS": str(share)}, shows=str(share)),
        reports="threads",
    )


def _pinning(cpus: int) -> Trial:
    share = str(cpus // PROCS)
    return Trial(
        name="launch.affinity",
        a=Side(label="unpinned ranks", shows=str(cpus)),
        b=Side(label="ranks on CPUs of their own", pin=True, shows=share),
        reports="cpus",
    )


def _interface(host: Host) -> Trial | str:
    """The network's interface against the loopback, or why not."""
    given = host.environment.get("GLOO_SOCKET_IFNAME", "")
    named = [i for i in host.interfaces if i.name == given]
    if given and not named:
        return f"{given} is no interface of this host"
    loopback = next((i for i in host.interfaces if i.kind == "loopback" and i.up), None)
    others = named or [i for i in host.networks() if any("." in address for address in i.addresses)]
    if loopback is None or not others or others[0].name == loopback.name:
        return "there is no second interface with an address"
    other = others[0]
    address = next((a for a in other.addresses if "." in a), "")
    return Trial(
        name="GLOO_SOCKET_IFNAME",
        a=Side(label=other.name, variables={"GLOO_SOCKET_IFNAME": other.name}, shows=address),
        b=Side(label=loopback.name, variables={"GLOO_SOCKET_IFNAME": loopback.name}, shows="127.0.0.1"),
        reports="addresses",
    )
