"""What tests share: plain PyTorch to compare with, devices to run on, and options to combine.

`zoo` has the models, `stubs` stand-ins for hardware, `processes` the scripts that run in processes of their own. There
are no tests here, and only tests import it.
"""
