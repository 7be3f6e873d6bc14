"""Operations on structures: nested containers of tensors, and FX graphs in which ops write to their inputs.

Tracing and everything that makes graphs does not live here (`relay.capture`).
Every folder of `relay` may import it; it imports PyTorch alone.
"""
