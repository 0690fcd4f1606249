"""Run a prefill node: `python -m prefill_node --help`. The node has adapters for both roles, so it can switch roles."""

import sys

from decode_node.receiver import HandoffReceiver
from node.process import main as run_node
from prefill_node.sender import HandoffSender
from scheduler.role import PREFILL
from shared.config.command_line import settings_from_command_line
from shared.config.settings import NodeSettings


def main(settings: NodeSettings) -> int:
    return run_node(settings, PREFILL, {"prefill": HandoffSender, "decode": HandoffReceiver})


if __name__ == "__main__":
    sys.exit(main(settings_from_command_line(NodeSettings, sys.argv[1:], "python -m prefill_node")))
