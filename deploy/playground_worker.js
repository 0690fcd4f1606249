/* The worker of deploy/playground.js: loads Pyodide from its parts, then answers queries. */
"use strict";
const PYTHON = `
import json, sys
sys.path.insert(0, "/baton")
from compare.playground.interactive import simulate
from shared.errors import ConfigError

def answer(query):
    try:
        return json.dumps(simulate(json.loads(query)))
    except (ConfigError, ValueError, RecursionError) as error:
        return json.dumps({"error": str(error)[:300]})

answer
`;
// Pyodide refuses classic workers, but from a file:// page Chromium starts no others. Only imports need importScripts.
globalThis.importScripts = undefined;

let python = null;

async function load({ loader, module, wasm, library, lock, code }) {
  const url = (part) => URL.createObjectURL(new Blob([part], { type: "text/javascript" }));
  const fetched = globalThis.fetch;
  globalThis.fetch = (target, ...more) => String(target?.url ?? target).endsWith("pyodide.asm.wasm")
    ? Promise.resolve(new Response(wasm, { headers: { "content-type": "application/wasm" } })) : fetched(target, ...more);
  const [{ loadPyodide }, { default: createPyodideModule }] = await Promise.all([import(url(loader)), import(url(module))]);
  const pyodide = await loadPyodide({
    indexURL: "https://pyodide.invalid/", createPyodideModule, stdLibURL: url(library),
    lockFileContents: new TextDecoder().decode(lock),
  });
  pyodide.unpackArchive(code, "zip", { extractDir: "/baton" });
  return pyodide.runPython(PYTHON);
}

onmessage = async ({ data: { parts, id, query } }) => {
  if (parts) {
    python = load(parts);
    python.catch(() => {}); // each query reports the error
    return;
  }
  let answer;
  try {
    answer = (await python)(query);
  } catch (error) {
    answer = JSON.stringify({ error: `Python could not be started: ${error.message}` });
  }
  postMessage({ id, answer });
};
