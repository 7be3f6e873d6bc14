"""The commands that simulate: `relay simulate`, `relay plan`, `relay sweep`, and the options of a comparison.

Steps are simulated, machines compared and options swept in `relay.simulation`.
`relay/cli/__init__.py` imports it.
"""
