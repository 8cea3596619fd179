"""The `[telemetry]` section: where a run's figures go besides its records."""

from typing import Annotated

from msgspec import Meta

from paceline.config import Section


class TelemetrySection(Section, frozen=True):
    """Exporters; records and the live line are always on."""

    tensorboard: Annotated[
        bool, Meta(description="Write TensorBoard event files into the run's folder; needs the package tensorboard.")
    ] = False
