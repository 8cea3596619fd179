"""CUDA_VISIBLE_DEVICES names GPUs that are there, each once, and enough of them for the ranks."""

from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host

VARIABLES = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def look(host: Host, given: Given) -> Iterator[Found]:
    ranks = given.local_ranks(host)
    visible = len(host.gpus)
    for name in VARIABLES:
        text = host.environment.get(name)
        if text is None:
            continue
        parts = [part.strip() for part in text.split(",") if part.strip()]
        numbers = [int(part) for part in parts if part.isdigit()]
        wrong = [n for n in numbers if n >= len(host.gpus)]
        twice = sorted({p for p in parts if parts.count(p) > 1})
        if wrong or twice:
            what = f"names GPU {wrong[0]} and there are {len(host.gpus)}" if wrong else f"names {twice[0]} twice"
            yield Found(found=f"{name}={text} {what}", mend=f"unset {name}")
        elif not parts or parts[0] == "-1":
            yield Found(found=f"{name}={text} hides all {len(host.gpus)} GPUs", mend=f"unset {name}")
        visible = min(visible, len(parts))
    if 0 < visible < ranks:
        yield Found(
            found=f"{ranks} ranks on {visible} visible GPUs",
            mend=f"start {visible} ranks: --procs {visible}",
            why="ranks beyond the last GPU fail at the start, or 2 share one and each takes twice as long",
        )


CHECK = Check(
    id="gpu-visible",
    severity="error",
    title="CUDA_VISIBLE_DEVICES names missing GPUs, hides all, or leaves fewer than ranks",
    why="CUDA drops the first wrong number and all behind it: a job asks for 8 and finds 3",
    mend="unset CUDA_VISIBLE_DEVICES",
    source="CUDA C++ programming guide, Environment variables",
    needs=("environment", "gpus"),
    gpus=True,
    look=look,
)
