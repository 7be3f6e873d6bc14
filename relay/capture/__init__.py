"""Capture: PyTorch modules to graphs, and graphs to programs. torch's private tracing interfaces are used here alone.

No models as wholes (`relay.partition`) and no devices, transfers or steps (`relay.runtime`) live here.
`relay.data` and the folders above it may import it; it imports `relay.graph`, `relay.errors` and `hal`.
"""

from relay.capture.capture import capture
from relay.capture.captured import Captured
from relay.capture.core.lowering import Lowering
from relay.capture.cost import fingerprint
from relay.capture.eager_call import EagerCall, ObservedGradientPresence
from relay.capture.fake_tensors import as_fake
from relay.capture.guards.data_guards import Guard, GuardTracer
from relay.capture.guards.functional_call import call_with
from relay.capture.guards.messages import unlogged
from relay.capture.random_ops import layer_of_segment
from relay.capture.request import CaptureRequest
from relay.capture.trace_for_device import graphs_for
from relay.capture.trace_model import BLOCK, SET_GRAD_ENABLED, BlockCall, blocks_as_ops, run_fake, trace
from relay.capture.traced_module import autocast

__all__ = [
    "BLOCK",
    "SET_GRAD_ENABLED",
    "BlockCall",
    "CaptureRequest",
    "Captured",
    "EagerCall",
    "Guard",
    "GuardTracer",
    "Lowering",
    "ObservedGradientPresence",
    "as_fake",
    "autocast",
    "blocks_as_ops",
    "call_with",
    "capture",
    "fingerprint",
    "graphs_for",
    "layer_of_segment",
    "run_fake",
    "trace",
    "unlogged",
]
