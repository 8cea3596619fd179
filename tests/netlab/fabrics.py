"""A case of `cases` as real links of a lab, and the study of it by the lab's crew."""

from __future__ import annotations

from paceline.bench.fabric_flows import Fabric
from paceline.bench.fabric_rank import study_fabric
from paceline.bench.fabric_study import Study
from tests.netlab.cases import Case
from tests.netlab.lab import Lab

MBIT = 100.0
"""Of a sound link: little enough that two cores keep up with eight directions at once."""

SECONDS = 0.25


def set_up(lab: Lab, case: Case, seed: int) -> None:
    """Give the lab's links the rates and the loss of a case."""
    for number, host in enumerate(lab.hosts):
        lab.mend(host)
        lab.link(host, out=MBIT * case.link(number, "out"), into=MBIT * case.link(number, "into"))
        if case.loss(number):
            lab.impair(host, loss=case.loss(number), seed=seed)
    for rack in range(len(case.racks)):
        lab.uplink(MBIT * case.uplink(rack), rack=rack)


def study_case(lab: Lab, case: Case, seed: int, seconds: float = SECONDS) -> Study:
    """The study of a case by one rank on each host."""
    set_up(lab, case, seed)
    count = len(lab.hosts)
    studies: list[Study] = lab.crew.run(study, count, [host.name for host in lab.hosts], seconds, timeout=60.0)
    assert all(found == studies[0] for found in studies[1:])
    return studies[0]


def study(rank: int, world_size: int, hosts: list[str], seconds: float) -> Study:
    return study_fabric(Fabric(hosts, range(world_size), seconds))
