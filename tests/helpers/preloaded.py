"""A Python interpreter that starts with torch and transformers already imported.

Most of the time of a test that runs the script is spent importing libraries. A server imports them
once per pytest worker and forks a child for every start. `Preloaded.python` takes the place of the
interpreter:

    preloaded = Preloaded()
    subprocess.run([preloaded.python, "real_model_example.py", "--max_steps", "2"])
    preloaded.stop()

It is a small program (preloaded_client.py) that sends its arguments, environment, folder, standard
streams and signal dispositions to the server (preloaded_server.py). The child that the server forks
takes them over and runs the program as `__main__`. The client forwards signals to the child and
exits as the child does; if it is killed, so is the child.

What a real start does, and how the child does it:

- Libraries read environment variables while they are imported. The client starts the real
  interpreter if a variable has another value than in the server, except those that are read at run
  time only (RUN_TIME).
- The program sets variables itself before it imports a library. Therefore `sys.modules` lacks the
  preloaded modules when the program starts; its first import of one of them compares the
  environment with the server's (see _Importer).
- Resource limits, namespaces, users, open files other than the standard streams, and options of the
  interpreter: the client starts the real interpreter.
- A string's hash differs from process to process. Ranks with an odd LOCAL_RANK come from a second
  server, so that an order that depends on hashes differs between neighboring ranks here, too.
- numpy draws its global seed while it is imported; the child draws another one.

Differences that stay: the child has another pid than the client and is a child of the server, its
/proc/PID/environ is the server's, and attributes such as `torch.distributed.fsdp` exist before
their module is imported. Tests that concern launchers, process trees, SIGSTOP, or the start itself
use the real interpreter.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
TITLE_BYTES = 16384  # room for the arguments that /proc/PID/cmdline of a child is to show


class Preloaded:
    """The servers of a pytest worker.

    Attributes:
        python: the interpreter to use.
    """

    def __init__(self):
        self.folder = Path(
            tempfile.mkdtemp(prefix="preloaded-", dir="/tmp")
        )  # a socket's path must be short
        self.python = self.folder / "python"
        self.python.write_text(
            f"#!{sys.executable} -IS\n{(HERE / 'preloaded_client.py').read_text()}"
        )
        self.python.chmod(0o755)
        self.servers: list[subprocess.Popen] = []
        self._start_server()

    def _start_server(self) -> None:
        path = self.folder / f"server{len(self.servers)}"
        command = [sys.executable, HERE / "preloaded_server.py", path, "-" * TITLE_BYTES]
        self.servers.append(subprocess.Popen(command, stdin=subprocess.PIPE))

    def replace(self, command: list) -> list:
        """The command under the preloaded interpreter, if it starts with python or torchrun."""
        if command[0] not in (sys.executable, "torchrun"):
            return command
        self._wait()
        if command[0] == sys.executable:
            return [self.python, *command[1:]]
        self.for_torchrun()
        return [self.python, Path(sys.executable).with_name("torchrun"), *command[1:]]

    def for_torchrun(self) -> dict:
        """The variable that names this interpreter to torchrun; the ranks need both servers."""
        if len(self.servers) == 1:
            self._start_server()
        self._wait()
        return {"PYTHON_EXEC": self.python}

    def _wait(self) -> None:
        """Wait for the servers, so that no time limit of a test includes their imports."""
        for number, server in enumerate(self.servers):
            while not (self.folder / f"server{number}").exists():
                assert server.poll() is None, "preloaded_server.py has failed"
                time.sleep(0.02)

    def stop(self) -> None:
        """End the servers, and with them every process that they forked."""
        for server in self.servers:
            server.stdin.close()
        for server in self.servers:
            server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)  # a server may have removed it
