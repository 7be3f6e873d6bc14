"""The core lowering: graphs rewritten to the closed set of ops of `hal.ops`, for devices that do not run PyTorch.

Native graphs, which keep PyTorch's own ops, and tracing itself do not live here.
The other modules of `relay.capture` may import it, mostly through `relay.capture.core.lowering`; it imports `hal.ops`.
"""
