"""Installing a package of ours or of the guide into a folder, without a network, and running commands that see it."""

import os
import shlex
import sys
from pathlib import Path

from tests.support.processes import ready_processes

ROOT = Path(__file__).parents[3]


def run(words: list[str], folder: Path, site: Path) -> str:
    """Run a command as a user would type it, with what is installed in `site` there; its standard output.

    `pip install` goes to `site`, with nothing downloaded. Both outputs are shown where the command fails.
    """
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([str(site), str(ROOT)]), OMP_NUM_THREADS="1")
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", "")])
    if words[:2] == ["pip", "install"]:
        options = ["--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--upgrade", "--target", str(site)]
        words = [sys.executable, "-m", "pip", "install", *options, *words[2:]]
    elif words[0] == "python":
        words = [sys.executable, *words[1:]]
    result = ready_processes.run(words, folder, environment, timeout=300)
    assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
    return result.stdout
