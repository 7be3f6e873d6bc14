"""The backends `cuda`, `xpu` and `mps`: PyTorch's accelerators, with PyTorch's own kernels.

Here live the device, what the families of accelerators differ in, the lowering of a program to a function over torch
tensors, draws on the device, and CUDA graphs. Queues on streams are not here but in `hal.kit.streams`.

The registry imports it, by entry point, and tests may; `backends.cpu` and `backends.simulator` import its `program`.
"""
