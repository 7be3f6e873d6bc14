"""Capture: from modules to graphs. The only package that touches torch's private tracing interfaces.

`joint` makes a segment's programs (`traced` is what it traces, `extraction` cuts them out), `core` rewrites them for
devices that are not PyTorch's, `tracing` traces whole models with their blocks opaque, `guards` answers what they
ask of a batch meanwhile, `given` sees what layers change of what they are given, `outside` and `attributes` refuse what
a trace would lose, `measure` counts what a graph costs, `explain` says why a capture failed.
"""

from relay.capture.capture import capture
from relay.capture.captured import Captured
from relay.capture.core.lowering import Lowering
from relay.capture.cost import fingerprint
from relay.capture.eager_call import Presence
from relay.capture.guards.data_guards import Guard, GuardTracer
from relay.capture.guards.functional_call import call_with
from relay.capture.guards.messages import unlogged
from relay.capture.layer_marks import layer_of_segment
from relay.capture.trace_for_device import graphs_for
from relay.capture.trace_model import BLOCK, BlockCall, as_fake, opaque_blocks, run_fake, trace
from relay.capture.traced_module import autocast

__all__ = [
    "BLOCK",
    "BlockCall",
    "Captured",
    "Guard",
    "GuardTracer",
    "Lowering",
    "Presence",
    "as_fake",
    "autocast",
    "call_with",
    "capture",
    "fingerprint",
    "graphs_for",
    "layer_of_segment",
    "opaque_blocks",
    "run_fake",
    "trace",
    "unlogged",
]
