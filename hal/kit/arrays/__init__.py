"""Core programs run op by op over an array library like numpy.

Here live each op over `Arrays`, the dtypes, the draws, the lowering of a program to a Python function, and numpy's
`Arrays`. Memory, queues and events are not here, nor any other array library, which a backend passes in as a module.

Backends and tests may import it, and so may the packages of third parties.
"""
