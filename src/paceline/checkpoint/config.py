"""`[checkpoint]`: what outlives the processes, how often it is saved, and what a run starts from."""

from typing import Annotated, Any

from msgspec import Meta

from paceline.config import Section
from paceline.units import Seconds, parse_seconds

AUTO = "auto"
AT_END = "end"
NEVER = "never"

Patterns = tuple[Annotated[str, Meta(min_length=1)], ...]


class CheckpointSection(Section, frozen=True):
    """Where checkpoints go, how often they are saved, which are kept, and what a run starts from."""

    dir: Annotated[
        str,
        Meta(
            min_length=1,
            description="Folder or URL (s3://bucket/run) of the checkpoints. auto: `checkpoints` in the run's folder.",
        ),
    ] = AUTO
    every: Annotated[
        Annotated[int, Meta(ge=1)] | str,
        Meta(
            description='Steps (100) or time ("10m") between two saves. auto: the interval that loses least, from the '
            "measured cost of a save and the failure rate; end: none before the last step. The last step is always saved."
        ),
    ] = AUTO
    keep: Annotated[
        int,
        Meta(ge=1, description="Newest checkpoints that are kept; an older one goes once a newer one is verified."),
    ] = 3
    keep_best: Annotated[
        int, Meta(ge=0, description="Checkpoints with the lowest evaluation loss that are kept besides.")
    ] = 0
    best_of: Annotated[
        Annotated[str, Meta(min_length=1)] | None,
        Meta(description="Evaluation set that keep_best goes by; needed where there are several."),
    ] = None
    resume: Annotated[
        str,
        Meta(
            min_length=1,
            description="auto: the same run directory goes on from its newest valid checkpoint. never: take the next free "
            "name, such as tiny-2. A path: a run without checkpoints of its own starts from that step, checkpoints or run "
            "folder.",
        ),
    ] = AUTO
    allow_change: Annotated[
        tuple[str, ...],
        Meta(description="Keys that may differ from the run directory's job, such as optimizer.lr."),
    ] = ()
    allow_missing: Annotated[
        Patterns,
        Meta(
            description="Tensors that the checkpoint named by resume may lack, such as model/head.*; they keep their "
            "initial values."
        ),
    ] = ()
    allow_unexpected: Annotated[
        Patterns, Meta(description="Tensors that the checkpoint named by resume may have beyond those of the model.")
    ] = ()
    storage_timeout: Annotated[
        Seconds, Meta(description="Longest wait for a save in flight, or for the storage to answer.")
    ] = Seconds(300.0)

    def __post_init__(self) -> None:
        _check_every(self.every)
        if self.storage_timeout <= 0:
            raise ValueError(f"storage_timeout = {self.storage_timeout:g}s waits for nothing; give more than 0s")
        if self.best_of is not None and self.keep_best == 0:
            raise ValueError(
                f'best_of = "{self.best_of}" has no effect with keep_best = 0; set keep_best, or remove it'
            )
        for key in ("allow_missing", "allow_unexpected"):
            patterns = getattr(self, key)
            if patterns and self.start_from is None:
                raise ValueError(
                    f'{key} = {list(patterns)} has no effect with resume = "{self.resume}": a run goes on from a '
                    "checkpoint of its own with all of its tensors; name another run's with resume, or remove it"
                )

    @property
    def every_steps(self) -> int | None:
        """Steps between two saves, where they are counted in steps."""
        return self.every if isinstance(self.every, int) else None

    @property
    def every_seconds(self) -> float | None:
        """Seconds between two saves, where a time is given."""
        if isinstance(self.every, int) or self.every in (AUTO, AT_END):
            return None
        return float(parse_seconds(self.every))

    @property
    def start_from(self) -> str | None:
        """The path that `resume` names."""
        return None if self.resume in (AUTO, NEVER) else self.resume

    def place(self, run_dir: Any) -> str:
        """The folder or URL of a run's checkpoints."""
        return f"{run_dir}/checkpoints" if self.dir == AUTO else self.dir


def _check_every(every: int | str) -> None:
    if isinstance(every, int) or every in (AUTO, AT_END):
        return
    try:
        seconds = parse_seconds(every)
    except ValueError:
        raise ValueError(
            f'every = "{every}" is no interval; write auto, end, a number of steps such as 100, or a time such as "10m"'
        ) from None
    if seconds <= 0:
        raise ValueError(f'every = "{every}" is no time; give more than 0s, or end to save after the last step only')
