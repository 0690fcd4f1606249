"""`baton role`: asks the router to give a running node another role, and says how that went."""

import sys
from urllib.parse import quote

import httpx

from shared.api_client import bearer

CONNECT_S = 5.0


def change_role(url: str, node: str, role: str, api_key: str = "") -> int:
    """Returns the exit status: 1, after one line on stderr, when the node kept its role. Waits as long as it drains."""
    target = f"{url.rstrip('/')}/v1/nodes/{quote(node, safe='')}/role"
    try:
        # No proxy: the default URL is this machine's.
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
