"""The backend `cupy`: CUDA through CuPy.

Here live the device, and in `runtime` every call of CuPy. The ops are in `hal.kit.arrays`, and queues on streams in
`hal.kit.streams`.

The registry imports it, by entry point, and tests may.
"""
