"""What training costs on machines that one may rent or buy: prices as they are given, and machines side by side.

Steps are simulated in `relay.simulation`, and printed by `relay.cli.buying`.
`relay/cli` may import it.
"""
