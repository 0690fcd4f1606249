"""Write the simulator's page as one HTML file that needs no server: `make playground`.

The file contains Pyodide (MPL-2.0), which runs the simulator's Python in a web worker. Pyodide is fetched from npm, and
its hash is checked.
"""

import argparse
import base64
import gzip
import hashlib
import html
import io
import json
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "dashboard" / "page"
VERSION, SHA256 = "314.0.7", "66b7949e5a0cba2250b586d7e368bf12fb482800748d182c4618254b685ffaa0"
PARTS = {  # maps the names that the worker uses to the names in the package
    "loader": "pyodide.mjs", "module": "pyodide.asm.mjs", "wasm": "pyodide.asm.wasm", "library": "python_stdlib.zip",
    "lock": "pyodide-lock.json",
}  # fmt: skip
NOT_FETCHED = 3  # exit status if Pyodide could not be downloaded
ENTRY = "compare.playground.interactive"
LIST = f"""
import json, sys, {ENTRY}
print(json.dumps([each.__file__ for each in sys.modules.values() if getattr(each, "__file__", None)]))
"""


def pyodide(folder: Path) -> dict[str, bytes]:
    """Return the files of Pyodide, which are downloaded to `folder` once."""
    path = folder / f"pyodide-{VERSION}.tgz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"pyodide@{VERSION}", "--pack-destination", str(folder)]
        try:
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"Pyodide could not be fetched from npm: {error}", file=sys.stderr)
            raise SystemExit(NOT_FETCHED) from None
    if (found := hashlib.sha256(path.read_bytes()).hexdigest()) != SHA256:
        raise SystemExit(f"{path}: its SHA-256 is {found}, but must be {SHA256}; delete it and try again")
    with tarfile.open(path) as package:
        read = {name: package.extractfile(f"package/{file}") for name, file in PARTS.items()}
        return {name: file.read() for name, file in read.items() if file is not None}


def code() -> bytes:
    """Return a zip file of the cost files and of all modules that the simulator imports."""
    command = [sys.executable, "-S", "-c", LIST]  # -S: without installed packages, because the browser has none
    listed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT).stdout
    paths = sorted(path for path in map(Path, json.loads(listed)) if path.is_relative_to(ROOT))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file:
        for path in [*paths, *sorted((ROOT / "engine" / "costs").glob("*.json"))]:
            file.writestr(zipfile.ZipInfo(str(path.relative_to(ROOT))), path.read_bytes())
    return packed.getvalue()


def inlined(page: str) -> str:
    """Return the page with its styles and scripts embedded. Imported modules become data URLs."""
    page = re.sub(r'<link rel="icon"[^>]*>\n', "", page)
    page = re.sub(
        r'<link rel="stylesheet" href="page/([^"]+)">', lambda found: f"<style>\n{_text(found[1])}</style>", page
    )
    page = re.sub(
        r'<script src="page/([^"]+\.js)" defer></script>', lambda found: f"<script>\n{_text(found[1])}</script>", page
    )

    def module(found: re.Match[str]) -> str:
        text = _text(found[1])
        imports = {name: _data(_text(name.removeprefix("./"))) for name in re.findall(r'from "(\./[^"]+)"', text)}
        maps = f'<script type="importmap">{json.dumps({"imports": imports})}</script>'
        return f'{maps}\n<script>\n{_own("playground.js")}</script>\n<script type="module">\n{text}</script>'

    return re.sub(r'<script src="page/([^"]+\.js)" type="module"></script>', module, page)


def _text(name: str) -> str:
    return (PAGE / name).read_text()


def _own(name: str) -> str:
    return (ROOT / "deploy" / name).read_text()


def _data(text: str) -> str:
    return "data:text/javascript;base64," + base64.b64encode(text.encode()).decode()


def build(folder: Path) -> str:
    """Return the page, which contains the files of Pyodide and the simulator's code in script elements."""
    parts = pyodide(folder) | {"code": code(), "worker": _own("playground_worker.js").encode()}
    scripts = [
        f'<script type="application/octet-stream" id="part-{html.escape(name)}">'
        + base64.b64encode(gzip.compress(part, mtime=0)).decode()
        + "</script>\n"
        for name, part in parts.items()
    ]
    head, end, tail = inlined(_text("simulator.html")).partition("</body>")
    return head + "".join(scripts) + end + tail


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=ROOT / "playground.html")
    options.add_argument("--cache", type=Path, default=ROOT / ".playground", help="where Pyodide is kept")
    given = options.parse_args()
    given.out.write_text(build(given.cache))
    print(f"{given.out}: {given.out.stat().st_size / 1e6:.1f} MB; open it with a browser")


if __name__ == "__main__":
    main()
