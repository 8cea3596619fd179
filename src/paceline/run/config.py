"""The `[run]` section: what the run is called, how long it is, where it lives and how often it speaks."""

from typing import Annotated

from msgspec import Meta

from paceline.config import Section
from paceline.units import Count


class RunSection(Section, frozen=True):
    """Name, length and place of a run. `steps`, `tokens` and `epochs` exclude each other."""

    name: Annotated[str | None, Meta(description="Name of the run's folder; the job file's stem unless given.")] = None
    seed: Annotated[int, Meta(description="Seed of initial weights, data order and dropout.", ge=0)] = 0
    steps: Annotated[Count | None, Meta(description="Length in optimizer steps; 1000 where no length is given.")] = None
    tokens: Annotated[Count | None, Meta(description="Length in tokens, rounded up to whole steps.")] = None
    epochs: Annotated[Annotated[float, Meta(gt=0)] | None, Meta(description="Length in passes over the data.")] = None
    dir: Annotated[str, Meta(description="Folder that holds the runs.", min_length=1)] = "runs"
    log_every: Annotated[int, Meta(description="Steps between two log lines and two window records.", ge=1)] = 10
    eval_every: Annotated[int, Meta(description="Steps between two evaluations; 0: at the end only.", ge=0)] = 0
    record_samples: Annotated[
        bool, Meta(description="Record the numbers of each step's samples; costs a collective per step. For proofs.")
    ] = False

    def __post_init__(self) -> None:
        if self.name is not None and (self.name in ("", ".", "..") or "/" in self.name or "\0" in self.name):
            raise ValueError(f"run.name = {self.name!r} is no folder name; write one path part and the rest in run.dir")
        given = [
            f"{key} = {value}" for key in ("steps", "tokens", "epochs") if (value := getattr(self, key)) is not None
        ]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} exclude each other; keep one of them as the length of the run")
        for key in ("steps", "tokens"):
            if getattr(self, key) == 0:
                raise ValueError(f"run.{key} = 0 trains nothing; give a length of at least 1")
