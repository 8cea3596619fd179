"""Versions that are not equal on all hosts."""

from collections.abc import Iterator, Sequence

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.differ import differences
from paceline.doctor.host import Host

HARMLESS = ("kernel", "msgspec")
SERIOUS = ("paceline", "torch", "nccl", "cuda")


def compare(hosts: Sequence[Host], given: Given) -> Iterator[Found]:
    for name in sorted({n for host in hosts for n in host.versions} - set(HARMLESS)):
        for text in differences(hosts, lambda host, name=name: host.versions.get(name, "not there")):  # type: ignore[misc]
            yield Found(
                found=f"{name} is {text}",
                mend=f"install one version of {name} on all hosts, best as one image",
                severity="error" if name in SERIOUS else "warning",
            )


CHECK = Check(
    id="versions-differ",
    severity="error",
    title="Versions of paceline, torch, NCCL, Python or the driver differ between hosts",
    why="NCCL of 2 versions does not connect; torch of 2 versions hangs or is wrong",
    mend="run one image on all hosts",
    source="NCCL user guide, Troubleshooting",
    needs=("versions",),
    compare=compare,
)
