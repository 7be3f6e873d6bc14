"""Whether a safetensors file is whole, which the library says without the name of a tensor.

The tensors are read elsewhere (`relay.models.load_pretrained`). Invariant: a file that passes has every byte that its
header promises.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relay.errors import RelayError

LENGTH = 8
"""Bytes at the start that give the length of the header."""


def check_whole(file: Path) -> None:
    """Raise RelayError where the file ends before its last tensor does, with the tensor and the bytes."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = LENGTH + int.from_bytes(opened.read(LENGTH), "little")
        text = opened.read(start - LENGTH) if start <= size else b""
    if size < LENGTH or start > size:
        raise RelayError(
            f"{file} is cut off: its header ends at byte {max(start, LENGTH):,}, and the file has {size:,} bytes. "
            "Download it again."
        )
    try:
        header: Any = json.loads(text)
        ends = {name: start + part["data_offsets"][1] for name, part in header.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as wrong:
        raise RelayError(f"{file} is no safetensors file: its header cannot be read ({wrong}).") from wrong
    beyond = sorted((end, name) for name, end in ends.items() if end > size)
    if beyond:
        end, name = beyond[0]
        raise RelayError(
            f"{file} is cut off: {name} ends at byte {end:,}, and the file has {size:,} of {max(ends.values()):,} "
            f"bytes ({len(beyond)} of its {len(ends)} tensors are not whole). Download it again."
        )
