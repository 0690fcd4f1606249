"""Run decode nodes as real processes. They start quickly, because they are forked from a process with all imports.

Usage: `python -m tests.node.forked_nodes SETTINGS DIRECTORY`. SETTINGS is JSON {name: {variable: value}}. The command
prints {name: pid} at once, and {name: exit status} when all nodes have ended. Each node logs to a file in DIRECTORY.
"""

import json
import os
import sys
from pathlib import Path

from decode_node.__main__ import main
from shared.config.command_line import settings_from_command_line
from shared.config.settings import NodeSettings
from shared.lifecycle import set_parent_death_signal


def run(name: str, variables: dict[str, str], log: Path, parent: int) -> None:
    set_parent_death_signal(parent)()
    os.environ.update(variables)
    fd = os.open(log, os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os._exit(main(settings_from_command_line(NodeSettings, ["--id", name], "node")))


if __name__ == "__main__":
    pids: dict[str, int] = {}
    ours = os.getpid()
    for name, variables in json.loads(sys.argv[1]).items():
        pids[name] = os.fork()
        if not pids[name]:
            run(name, variables, Path(sys.argv[2]) / f"{name}.log", ours)
    print(json.dumps(pids), flush=True)
    print(
        json.dumps({name: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for name, pid in pids.items()}), flush=True
    )
