"""The process in which a model's chat template runs: one template in, then conversations in and texts out.

A template is a program that came with the model. Jinja's sandbox keeps it from the machine, but not from a loop or a
text without end, so it runs here, with little memory and an alarm that ends it. Imports nothing of Baton.
"""

import json
import resource
import signal
import socket
import struct
import sys
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

LENGTH = struct.Struct("<I")
MEMORY_BYTES = 512 << 20  # of addresses; an interpreter with Jinja takes 50 MiB
MAX_CHARACTERS = 8 << 20  # of a rendered prompt; far beyond any context, far below what hurts
RENDER_S = 2


class TemplateRefusedError(Exception):
    """The template itself refuses the conversation."""


def _refuse(message: object) -> NoReturn:
    raise TemplateRefusedError(str(message)[:200])


def _to_json(value: object, indent: int | None = None) -> str:
    """Jinja's own filter escapes HTML, which a prompt is not."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def compiled(source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
    return environment.from_string(source)


def render(template: jinja2.Template, values: dict[str, Any]) -> dict[str, str]:
    """{"text": …}, or {"refused": …} with the template's own words, or {"failed": …} with ours for the log."""
    try:
        parts: list[str] = []
        size = 0
        for part in template.generate(**values):
            parts.append(part)
            size += len(part)
            if size > MAX_CHARACTERS:
                return {"refused": "it makes too much of it"}
        return {"text": "".join(parts)}
    except TemplateRefusedError as error:
        return {"refused": str(error)}
    except MemoryError:
        return {"refused": "it takes too much memory"}
    except Exception as error:  # noqa: BLE001 - whatever the model's authors have written
        return {"failed": f"{type(error).__name__}: {error}"[:200]}


def receive(connection: socket.socket) -> Any:
    """Raises EOFError when the other side has ended."""
    head = connection.recv(LENGTH.size, socket.MSG_WAITALL)
    if len(head) < LENGTH.size:
        raise EOFError
    left, pieces = LENGTH.unpack(head)[0], []
    while left:
        piece = connection.recv(min(left, 1 << 20))
        if not piece:
            raise EOFError
        pieces.append(piece)
        left -= len(piece)
    return json.loads(b"".join(pieces))


def send(connection: socket.socket, value: object) -> None:
    data = json.dumps(value).encode()
    connection.sendall(LENGTH.pack(len(data)) + data)


def main() -> None:
    """Answers on the socket that is its standard input until the other side has ended."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C in a terminal means the router, which may still need us
    connection = socket.socket(fileno=0)
    source = receive(connection)
    signal.alarm(RENDER_S)  # its default is to end the process: nothing that the template does can hold it off
    try:
        template = compiled(source)
    except (jinja2.TemplateError, ArithmeticError, RecursionError, MemoryError) as error:
        send(connection, {"failed": str(error)[:200] or type(error).__name__})
        return
    send(connection, {})
    while True:
        signal.alarm(0)
        values = receive(connection)
        signal.alarm(RENDER_S)
        send(connection, render(template, values))


if __name__ == "__main__":
    try:
        main()
    except (EOFError, ConnectionError):
        sys.exit(0)
