"""One rank of `paceline bench fabric`: runs the flows of a study with the other hosts, and tells each as it is seen."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch.distributed as dist

from paceline.bench.fabric_findings import doubted
from paceline.bench.fabric_flows import Fabric
from paceline.bench.fabric_study import Company, Study, fill
from paceline.bench.pairs import Flow, Seen, tournament
from paceline.bench.place import Place, node_names
from paceline.bench.rank import Rank, joined
from paceline.parallel.collectives import gather_objects

WARM_SECONDS = 0.05


def measure_fabric(rank: Rank, seconds: float) -> Study:
    """Study the fabric between the hosts of this run; all ranks return the same.

    Args:
        seconds: how long each flow runs.
    """
    places: list[Place] = gather_objects(Place.here(rank.world.rank), dist.group.WORLD)
    names, speakers = ends(places)
    several = len(node_names(places)) > 1
    rank.tell({"kind": "about", "hosts": names, "several": several, "backend": "gloo", "seconds": seconds})
    return study_between(Fabric(names, speakers, seconds), rank)


def study_between(fabric: Fabric, rank: Rank | None = None) -> Study:
    """The study, told flow by flow where there is a rank to tell it."""
    warm_up(fabric)
    study = Study(fabric.hosts)

    def measure(flows: Sequence[Flow], company: Company) -> list[Seen]:
        found = fabric.measure(flows)
        for seen in found if rank is not None else ():
            rank.tell({"kind": "flow", "company": company, **msgspec.structs.asdict(seen)})
        return found

    fill(study, measure, doubted)
    return study


def warm_up(fabric: Fabric) -> None:
    """Each pair once, for a moment: opens the connections and finds a size for the chunks."""
    seconds, fabric.seconds = fabric.seconds, WARM_SECONDS
    for flows in tournament(range(len(fabric.hosts))):
        fabric.measure(flows)
    fabric.seconds = seconds


def ends(places: Sequence[Place]) -> tuple[list[str], list[int]]:
    """Names of the ends of flows, and the rank that speaks for each: the first one of a node, or every rank of the only one."""
    nodes = node_names(places)
    if len(nodes) == 1:
        return [f"{place.host}:{place.rank}" for place in places], [place.rank for place in places]
    first = [next(place for place in places if place.node == node) for node in nodes]
    hosts = [place.host for place in first]
    return hosts if len(set(hosts)) == len(hosts) else nodes, [place.rank for place in first]


def main() -> None:
    with joined() as rank:
        study = measure_fabric(rank, float(rank.options["seconds"]))
        rank.tell({"kind": "study", "study": msgspec.to_builtins(study)})


if __name__ == "__main__":
    main()
