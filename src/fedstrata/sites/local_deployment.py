"""Try out a deployment on one machine. The server and each site are processes with their own certificates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from fedstrata.base.printable import print_lines
from fedstrata.sites.federation import Sites
from fedstrata.sites.processes import end, start
from fedstrata.sites.provision import ADMIN, SERVER, provision
from fedstrata.sites.submit import Report, submit
from fedstrata.spec.experiment import Experiment


def try_out(spec: Experiment, sites: Sites, out: Path, *, base_dir: Path, report: Report = print_lines) -> Path:
    """Create the parties' folders, start the server and the sites, run the job, fetch its result, and stop all parties.

    Args:
        spec: The experiment.
        sites: The federation; the server's host must be ``localhost``.
        out: The folder that will contain the parties' folders and the result. It must not exist, or must be empty.
        base_dir: The folder to which relative paths of data files refer.
        report: A function that is called with a line of text about each event, such as the start of the job.

    Returns:
        The run folder, ``out/result``.
    """
    provision(spec, sites, out, base_dir=base_dir)
    with Processes(out) as processes:
        for name in (SERVER, *sites.site):
            processes.start(name)
        report(f"started the server and {len(sites.site)} sites; their output is in {out}/*/console.txt")
        return submit(out / ADMIN, out / "result", sites=len(sites.site), lost=60.0, report=report)


class Processes:
    """The processes of the server and the sites in a trial on one machine.

    At the end of the ``with`` block, these processes and their child processes are stopped.

    Args:
        out: The folder that ``provision`` wrote.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self.running):
            self.kill(name)

    def start(self, name: str) -> subprocess.Popen[bytes]:
        """Start the server or a site with the start script in its folder, and return the process."""
        folder = (self.out / name).absolute()
        environment = os.environ | {"FEDSTRATA_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
        with (folder / "console.txt").open("ab") as console:
            command = ["bash", str(folder / "startup" / "sub_start.sh"), "--once"]
            self.running[name] = start(command, cwd=folder, stdout=console, stderr=subprocess.STDOUT, env=environment)
        return self.running[name]

    def kill(self, name: str) -> None:
        """Kill the server or a site, and its child processes, with SIGKILL."""
        end(self.running.pop(name), 0)
