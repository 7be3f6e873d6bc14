"""The tests of the project: a folder for each folder of the code, and `structure` for what no part can check alone.

What several of them use is in `support`. Nothing of the project imports it.
"""
