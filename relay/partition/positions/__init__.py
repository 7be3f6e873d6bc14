"""The last segment over chunks of positions: which of its ops work position by position, and the chunk's own graph.

No layers (`relay.capture.row_chunks` has the pieces of those) and no batches live here, and nothing runs.
`relay.runtime`, `relay.simulation` and the folders above them may import it.
"""
