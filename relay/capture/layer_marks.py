"""Which layer an op of a trace belongs to, where a segment holds several layers.

Random ops count by it. The number rides along as an annotation of PyTorch's tracer; outside of tracing nothing is
done.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import fx
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_NAME = "relay_layer"


def layer_of_segment(number: int) -> contextlib.AbstractContextManager[Any]:
    """Around the call of a segment's layer of that number."""
    if get_proxy_mode() is None:
        return contextlib.nullcontext()
    context: contextlib.AbstractContextManager[Any] = traceback.annotate({_NAME: number})
    return context


def layer_of(node: fx.Node) -> int:
    """The layer in whose call an op was traced: 0 where nothing was said."""
    number: int = node.meta.get("custom", {}).get(_NAME, 0)
    return number
