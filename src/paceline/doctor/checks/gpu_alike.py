"""GPUs of one host that are not alike."""

from collections import Counter
from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host
from paceline.units import format_bytes


def look(host: Host, given: Given) -> Iterator[Found]:
    kinds = Counter((gpu.name, gpu.memory) for gpu in host.gpus)
    if len(kinds) > 1:
        listed = [f"{count} x {name} {format_bytes(memory)}" for (name, memory), count in kinds.most_common()]
        odd = [str(g.index) for g in host.gpus if (g.name, g.memory) != kinds.most_common(1)[0][0]]
        keep = ",".join(str(g.index) for g in host.gpus if str(g.index) not in odd)
        yield Found(found=" and ".join(listed), mend=f"export CUDA_VISIBLE_DEVICES={keep}")


CHECK = Check(
    id="gpu-alike",
    severity="warning",
    title="The GPUs of a host are not alike",
    why="ranks hold 1 layout: memory is the smallest GPU's, and each step takes as long as on the slowest",
    mend="leave the odd ones out with CUDA_VISIBLE_DEVICES",
    source="paceline, docs/guide/doctor.md",
    needs=("gpus",),
    gpus=True,
    look=look,
)
