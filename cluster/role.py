"""`baton role`: changes the role of a running node through the router, and prints the result."""

import sys
from urllib.parse import quote

import httpx

from shared.api_client import bearer

CONNECT_S = 5.0


def change_role(url: str, node: str, role: str, api_key: str = "") -> int:
    """Change a node's role, and wait while it drains.

    Return the exit status, which is 1, after one line on stderr, if the node keeps its role.
    """
    target = f"{url.rstrip('/')}/v1/nodes/{quote(node, safe='')}/role"
    try:
        # Ignore proxy settings, because the default URL is on this machine.
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        headers = bearer(api_key)
        answer = httpx.post(target, json={"role": role}, headers=headers, timeout=timeout, trust_env=False)
        said = answer.json()
        if answer.status_code != 200:
            return _complain(said["error"]["message"])
        print(f"{said['node']} is a {said['role']} node now" + (f"; {said['note']}" if said["note"] else ""))
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return _complain(f"no router at {url}: {error or type(error).__name__}")
    except (ValueError, KeyError, TypeError):
        return _complain(f"{url} did not answer as a Baton router does; is it one?")
    return 0


def _complain(text: str) -> int:
    print(f"baton role: {text}", file=sys.stderr)
    return 1
