"""Run a node: `python -m tests.cluster.named_node ROLE FILE FLAGS`. FILE lists the addresses of the routers."""

import sys
from pathlib import Path

from decode_node.receiver import HandoffReceiver
from node.process import main
from prefill_node.sender import HandoffSender
from scheduler.role import ROLES
from shared.config.command_line import settings_from_command_line
from shared.config.settings import NodeSettings

ROLE, FILE, *FLAGS = sys.argv[1:]
ADDRESSES = Path(FILE)


async def read_addresses() -> list[str]:
    """Return the addresses in the file. An empty file stands for a failure of the name service."""
    if addresses := ADDRESSES.read_text().split():  # noqa: ASYNC240 - a short file
        return addresses
    raise OSError("the name service failed")


if __name__ == "__main__":
    settings = settings_from_command_line(NodeSettings, FLAGS, "named_node")
    sys.exit(main(settings, ROLES[ROLE], {"prefill": HandoffSender, "decode": HandoffReceiver}, read_addresses))
