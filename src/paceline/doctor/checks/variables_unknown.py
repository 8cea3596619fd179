"""Variables whose name is a slip of the pen: nothing reads them, and nothing says so."""

import difflib
from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.doctor.variables import table

CLOSE = 0.9
"""Share of letters in common from which a name is taken for a slip; further off it may be a plugin's own."""


def look(host: Host, given: Given) -> Iterator[Found]:
    known = set(table().lists["known"]) | {rule.name for rule in table().variable}
    for name, value in sorted(host.environment.items()):
        if name in known:
            continue
        near = difflib.get_close_matches(name, known, n=1, cutoff=CLOSE)
        if near:
            yield Found(
                found=f"{name}={value}: nothing reads this name, {near[0]} is one",
                mend=f"export {near[0]}={value}; unset {name}",
            )


CHECK = Check(
    id="variables-unknown",
    severity="warning",
    title="A variable has a name that nothing reads, close to one that is read",
    why="it has 0 effect, and nothing says so: the run goes on with the default",
    mend="correct the name",
    source="NCCL user guide, Environment Variables; torch, ProcessGroupNCCL.hpp",
    needs=("environment",),
    look=look,
)
