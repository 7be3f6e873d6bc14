"""The backends that come with the relay, one file or folder for each.

Here lives what a vendor's library or PyTorch does for a device, behind the interfaces of `hal.device`. What backends
share is in `hal.kit`, except that `cpu` and `simulator` run programs as `torch_device` does.

The registry (`hal.registry`) imports them, by entry point, and tests may; `hal` and `relay` do not import them.
"""
