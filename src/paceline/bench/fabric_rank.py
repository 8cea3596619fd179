"""One rank of `paceline bench fabric`: runs the flows of a study with the other hosts, and tells each as it is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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

Told = Callable[[Company, Seen], None]


def program(rank: Rank) -> None:
    """Study the fabric between the hosts of this run, and tell hosts, flows and the whole study."""
    seconds = float(rank.options["seconds"])
    places: list[Place] = gather_objects(Place.here(rank.world.rank), dist.group.WORLD)
    names, speakers = ends(places)
    rank.tell({"kind": "about", "hosts": names, "several": len(node_names(places)) > 1})
    rank.tell({"kind": "note", "text": f"{len(names)} ends of flows, {seconds:g} s each flow: {' '.join(names)}"})

    def told(company: Company, seen: Seen) -> None:
        rank.tell({"kind": "flow", "company": company, "seen": msgspec.structs.asdict(seen)})

    study = study_fabric(Fabric(names, speakers, seconds), told)
    rank.tell({"kind": "study", "study": msgspec.to_builtins(study)})


def study_fabric(fabric: Fabric, told: Told = lambda company, seen: None) -> Study:
    """The study of a fabric, equal on all ranks; `told` hears of each flow as it is seen."""
    warm_up(fabric)
    study = Study(fabric.hosts)

    def measure(flows: Sequence[Flow], company: Company) -> list[Seen]:
        found = fabric.measure(flows)
        for seen in found:
            told(company, seen)
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
    """Names of the ends of flows, and the rank that speaks for each: a node's first one, or every rank of the only node."""
    nodes = node_names(places)
    if len(nodes) == 1:
        return [f"{place.host}:{place.rank}" for place in places], [place.rank for place in places]
    first = [next(place for place in places if place.node == node) for node in nodes]
    hosts = [place.host for place in first]
    return hosts if len(set(hosts)) == len(hosts) else nodes, [place.rank for place in first]


def main() -> None:
    with joined() as rank:
        program(rank)


if __name__ == "__main__":
    main()
