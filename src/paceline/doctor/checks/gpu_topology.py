"""Pairs of GPUs that are joined worse than their neighbours, and GPUs without a network card near them."""

from collections import Counter
from collections.abc import Iterator

from paceline.doctor.check import Check, Found, Given
from paceline.doctor.host import Host

FAR = ("PHB", "NODE", "SYS")


def look(host: Host, given: Given) -> Iterator[Found]:
    gpus = [name for name in host.topology if name.startswith("GPU")]
    pairs = {(a, b): host.topology[a][b] for a in gpus for b in gpus if a < b and b in host.topology[a]}
    linked = [p for p in pairs.values() if p.startswith("NV")]
    cut = sorted(f"{a}-{b} ({p})" for (a, b), p in pairs.items() if not p.startswith("NV"))
    if linked and cut and len(linked) > len(cut):
        usual = Counter(linked).most_common(1)[0][0]
        yield Found(
            found=f"{', '.join(cut[:4])}{', ...' if len(cut) > 4 else ''} without NVLink, "
            f"{len(linked)} other pairs have {usual}",
            severity="error",
        )
    far = [name for name in gpus if (cards := _to_cards(host, name)) and all(path in FAR for path in cards)]
    near = [name for name in gpus if name not in far and _to_cards(host, name)]
    if far and near:
        yield Found(
            found=f"{', '.join(far)} have no network card on their own PCI switch, {len(near)} others have",
            mend="nvidia-smi topo -m; check that all cards are seated and up",
        )


def _to_cards(host: Host, gpu: str) -> list[str]:
    return [path for name, path in host.topology[gpu].items() if name.startswith("NIC")]


CHECK = Check(
    id="gpu-topology",
    severity="warning",
    title="Pairs of GPUs, or GPUs and network cards, are joined worse than their neighbours",
    why="a ring through such a pair leaves NVLink for PCIe: on an H100 64 GB/s each way in place of 450",
    mend="nvidia-smi topo -m; restart nvidia-fabricmanager; restart the host",
    source="NCCL user guide, NCCL_P2P_LEVEL (path types); NVIDIA H100 data sheet",
    needs=("gpus", "topology"),
    gpus=True,
    look=look,
)
