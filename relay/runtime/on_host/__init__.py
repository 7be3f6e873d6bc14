"""Programs that Python runs, in the place of a device that takes graphs alone: the host runs them.

What such a program is stands in `relay.capture.eager_call`; the order of visits is `relay.runtime.schedule`'s.
`relay.runtime` may import it.
"""
