"""Where the page of a report goes. Apart from `render`, so that a report without a page loads no template engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.errors import JobError
from paceline.run.files import is_no_space, write_atomic


def write_page(folders: Sequence[Path], documents: Sequence[dict[str, Any]], path: Path | None) -> Path | None:
    """Write the page of one run (to its folder unless told otherwise) or the comparison of several (where told).

    Raises:
        JobError: the place cannot be written.
        DiskFull: no space.
    """
    if path is None and len(folders) > 1:
        return None
    from paceline.report.render import render_comparison, write_report
    from paceline.report.text import comparison_rows

    target = path or folders[0] / "report.html"
    try:
        if len(folders) == 1:
            return write_report(folders[0], documents[0], target)
        write_atomic(target, render_comparison(list(documents), comparison_rows(documents)))
        return target
    except OSError as error:
        if is_no_space(error):
            raise
        raise JobError(
            f"cannot write the report to {target}: {error.strerror}",
            values={"path": str(target)},
            hint="Give a path that you may write with --html.",
        ) from None
