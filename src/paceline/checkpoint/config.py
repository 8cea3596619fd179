"""`[checkpoint]`: what outlives the processes."""

from typing import Annotated, Literal

from msgspec import Meta

from paceline.config import Section


class CheckpointSection(Section, frozen=True):
    """What to do with a run directory that is already there, and which changes of the job it may take."""

    resume: Annotated[
        Literal["auto", "never"],
        Meta(description="auto: the same run directory goes on. never: take the next free name, such as tiny-2."),
    ] = "auto"
    allow_change: Annotated[
        tuple[str, ...],
        Meta(description="Keys that may differ from the run directory's job, such as optimizer.lr."),
    ] = ()
