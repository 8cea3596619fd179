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
    why="1 wrong value is enough for a hang, or for another network; each row of the table of variables says what it costs",
    mend="unset the variable",
    source="the table of variables names it for each",
    needs=("environment",),
    look=look,
)
