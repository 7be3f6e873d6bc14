"""Small models, in one table (`table`): what is odd about each, and how equal it must be to plain PyTorch.

The classes are in the other files, which know nothing of the relay but its GPT. Tests of any folder take cases here.
"""
