"""OpenCL C from core programs: lowering to tasks, fusion, planning of launches, and the text of each kernel.

Here live the passes from a program to a list of launches with their sources and arguments. Nothing here calls OpenCL,
and memory and queues are in `backends.opencl`.

Only `backends.opencl` and tests may import it.
"""
