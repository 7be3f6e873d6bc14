"""The comparison of a trainer's steps with plain PyTorch: `trainer.verify`.

`plain_run` is plain PyTorch that holds the whole model, `given_draws` gives it the relay's random numbers, `run_copy`
restores the run afterwards, `comparison` makes the steps beside each other, and `report` describes what was found.
No part of a step of the relay is implemented here, and plain PyTorch uses none of the relay's arithmetic: only the loss
weights and the random numbers are the relay's.
`relay.trainer` and the folders above it may import this folder.
"""
