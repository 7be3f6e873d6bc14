"""Stand-ins for hardware and libraries that are not there, and backends with one thing wrong.

No device that computes for a user is here. Only tests import it.
"""
