"""Environment variables whose value is wrong, from the table."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.doctor.variables import evidence, matching


def look(host: Host, given: Given) -> Iterator[Found]:
    for rule in matching(host, given):
        extra = evidence(rule, host)
        yield Found(
            found=f"{rule.name}={host.environment[rule.name]}{f'; {extra}' if extra else ''}",
            mend=rule.mend or f"unset {rule.name}",
            why=rule.why,
            severity=rule.severity,
            source=rule.source,
        )


CHECK = Check(
    id="variables",
    severity="warning",
    title="An environment variable of NCCL, Gloo, torch, CUDA or OpenMP has a wrong value",
    why="one left-over variable can take 9 tenths of a link's rate; each value's own cost stands in the table of variables",
    mend="unset the variable",
    source="the table of variables names it for each",
    needs=("environment",),
    look=look,
)
