"""What makes a native graph the one that PyTorch's own kernels would run: their strides, and none of their stand-ins.

The tracing itself, and the dtypes of norms, live one folder up; the core lowering in `relay.capture.core`.
The other modules of `relay.capture` may import it; it imports `relay.capture.guards` alone.
"""
