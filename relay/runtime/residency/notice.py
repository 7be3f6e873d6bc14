"""The notice of what `resident_layers="auto"` chose: one line in the log where the choice is new.

Commands show it (`relay.cli.compile_notice`). Nothing is chosen here. Invariant: an unchanged choice is logged once.
"""

from __future__ import annotations

import logging

from hal.spec.units import format_size
from relay.runtime.residency.choice import MARGIN, Residents

logger = logging.getLogger("relay")


def note_residents(new: Residents, known: Residents | None, segments: int, size: int, training: bool) -> Residents:
    """Log the choice if it is not the one that was logged before. Returns what is logged now."""
    names = [content.name for content in new.contents]
    if known is not None and names == [content.name for content in known.contents]:
        return known
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    logger.info(
        "resident_layers='auto': %d of %d segments stay on the device while %s%s (%s; %.0f %% of it is left free).",
        len(names),
        segments,
        "training" if training else "evaluating",
        f": {shown}" if names else "",
        format_size(size),
        100 * MARGIN,
        extra={"event": "residents"},
    )
    return new
