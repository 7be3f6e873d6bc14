"""Sparse rows: of a table that a pass looks few rows up in, those rows alone go to the device and come back.

The memory of the rows is the store's (`relay.eps.rows`), and the programs' form is `relay.capture.native`'s.
`relay.runtime` may import it.
"""
