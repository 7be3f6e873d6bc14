"""Scripts that tests run in processes of their own, and `ready_processes`, which starts them quickly.

What measures a process (its memory, threads, files) or ends one is here, for other tests share theirs. Only tests run
them; each prints its figures as JSON.
"""
