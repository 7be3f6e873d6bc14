"""What must be set before numpy is imported: its matrix products on one thread, as torch's are in these tests.

Two test processes whose products each spin on all cores wait for each other most of the time.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
