"""Starts the process that renders formulas.

sphinxcontrib-katex takes the server for ready when its socket file exists, which is before it accepts connections: on
a busy machine the build then fails and leaves the server behind. Here a refused connection is tried again.
"""

from __future__ import annotations

import atexit
import socket
import subprocess
import tempfile
import time
from pathlib import Path

from sphinxcontrib.katex import KaTeXServer


def start(timeout_s: float = 60.0) -> None:
    """Start the server for this build, and end it with the build.

    Raises:
        RuntimeError: if it does not answer in time.
    """
    folder = Path(tempfile.mkdtemp(prefix="katex"))
    path = folder / "katex.sock"
    command = KaTeXServer.build_command(socket=path)
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, cwd=folder)
    deadline = time.monotonic() + timeout_s
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
            break
        except (FileNotFoundError, ConnectionRefusedError) as error:
            connection.close()
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise RuntimeError(f"the KaTeX server did not start: {' '.join(command)}") from error
            time.sleep(0.02)
    KaTeXServer.katex_server = KaTeXServer(folder, process, connection)
    atexit.register(KaTeXServer.terminate, KaTeXServer.katex_server)
