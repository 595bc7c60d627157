"""A Python interpreter that starts with torch and transformers already imported.

Most of the time of a test that runs the script is spent importing libraries. A server imports them
once per pytest worker and forks a child for every start. `Preloaded.python` takes the place of the
interpreter: a small program (preloaded_client.py) that sends its arguments, environment, folder and
standard streams to the server (preloaded_server.py). The child takes them over and runs the program
as `__main__`. The client forwards signals to it and exits as it does.

Libraries read environment variables while they are imported: the client starts the real interpreter
if a variable differs from the server's, except those of RUN_TIME. The program sets some itself, so
`sys.modules` lacks the libraries until the program first imports one of them.

A string's hash differs from process to process. Ranks with an odd LOCAL_RANK come from a second
server, so that an order that depends on hashes differs between neighboring ranks here, too.

The child's parent, its /proc/PID, resource limits and namespaces are those of the server: tests
that concern these, launchers, SIGSTOP, or the start itself use the real interpreter.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent


class Preloaded:
    """The servers of a pytest worker. `python` is the interpreter to use."""

    def __init__(self):
        # A socket's path must be short.
        self.folder = Path(tempfile.mkdtemp(prefix="preloaded-", dir="/tmp"))
        self.python = self.folder / "python"
        client = (HERE / "preloaded_client.py").read_text()
        self.python.write_text(f"#!{sys.executable} -IS\n{client}")
        self.python.chmod(0o755)
        self.servers: list[subprocess.Popen] = []
        self._start_server()

    def _start_server(self) -> None:
        path = self.folder / f"server{len(self.servers)}"
        command = [sys.executable, HERE / "preloaded_server.py", path]
        self.servers.append(subprocess.Popen(command, stdin=subprocess.PIPE))

    def replace(self, command: list) -> list:
        """The command under the preloaded interpreter, if it starts with python or torchrun."""
        if command[0] == "torchrun":
            self.for_torchrun()
            return [self.python, Path(sys.executable).with_name("torchrun"), *command[1:]]
        self.wait()
        return [self.python, *command[1:]] if command[0] == sys.executable else command

    def for_torchrun(self) -> dict:
        """The variable that names this interpreter to torchrun; the ranks need both servers."""
        if len(self.servers) == 1:
            self._start_server()
        self.wait()
        return {"PYTHON_EXEC": self.python}

    def wait(self) -> None:
        """Wait for the servers, so that no time limit of a test includes their imports."""
        for number, server in enumerate(self.servers):
            while not (self.folder / f"server{number}").exists():
                assert server.poll() is None, "preloaded_server.py has failed"
                time.sleep(0.02)

    def stop(self) -> None:
        """End the servers, and with them every process that they forked."""
        for server in self.servers:
            server.stdin.close()
            server.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
