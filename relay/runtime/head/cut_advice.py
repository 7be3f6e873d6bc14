"""Which cuts of the head or of layers would reduce the workspace of a run that does not fit, with the figures.

For error messages (`relay.runtime.memory_plan`). Nothing is chosen or compiled here. Invariant: an option is named only
where the kernels that it cuts are those that need most.
"""

from __future__ import annotations

from collections.abc import Sequence

from hal.spec.units import format_size
from relay.runtime.stages import CompiledModel, Stage


def cut_advice(compiled: Sequence[CompiledModel]) -> tuple[str, ...]:
    """Options, each with why, for micro-batches with these compiled models. A head over the whole batch has no cut."""
    model = max(dict.fromkeys(compiled), key=lambda one: max(map(_workspace, one.stages), default=0))
    *layers, last = model.stages
    head, chunks = _workspace(last), model.partition.segments[-1].chunks
    largest = max(layers, key=_workspace, default=last)
    if model.head is not None and head > _workspace(largest):
        return ()
    if head > _workspace(largest):
        takes = f"takes {format_size(head)} of workspace, and no other segment more than "
        takes += format_size(_workspace(largest) if layers else 0)
        if chunks is not None:
            return (f"head_chunk_tokens= below {chunks.size} (a chunk {takes})",)
        return () if model.partition.left_whole else (f"head_chunk_tokens='auto' (the head {takes})",)
    if largest.segment.kind is not None and largest.segment.row_chunk is None:
        return (f"mlp_chunk_tokens= (layer {largest.segment.name!r} takes {format_size(_workspace(largest))})",)
    return ()


def why_whole(compiled: Sequence[CompiledModel]) -> str:
    """Why the head does not run over chunks where they were asked for, as a sentence; empty where it does."""
    reasons = [model.partition.left_whole for model in compiled if model.partition.left_whole]
    return f" The head is left whole, since {reasons[0]}." if reasons else ""


def _workspace(stage: Stage) -> int:
    return max((program.program.workspace for program in stage.programs), default=0)
