"""What models are, for simulated runs: sizes, names, Hugging Face configurations, and modules on torch's meta device.

Not here: the machine, the simulated step and its figures (`relay/simulation`).
Imported by `relay/simulation`, `relay/fitting` and `relay/cli`; it imports nothing from the folder above.
"""
