/* The worker of deploy/playground.js: loads Pyodide from its parts, then answers queries. A query ends when a newer one
   arrives. */
"use strict";
const PYTHON = `
import json, sys
sys.path.insert(0, "/baton")
from compare.playground.interactive import slices
from shared.errors import ConfigError

def answer(query):
    try:
        for found in slices(json.loads(query)):
            yield json.dumps(found) if found else ""
    except (ConfigError, ValueError, RecursionError) as error:
        yield json.dumps({"error": str(error)[:300]})

answer
`;
// Pyodide refuses classic workers, which it recognizes by importScripts, but Chromium starts no others from file:// pages.
globalThis.importScripts = undefined;

const SLICE_MS = 40; // time between two checks for a newer query
let python = null, newest = 0;

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
  newest = id;
  let answer = JSON.stringify({ error: "a newer run has replaced this one" });
  try {
    const run = (await python)(query);
    let began = performance.now();
    for (const found of run) {
      if (found) answer = found;
      if (performance.now() - began < SLICE_MS) continue;
      await new Promise((done) => setTimeout(done));
      if (newest !== id) break;
      began = performance.now();
    }
    run.destroy();
  } catch (error) {
    answer = JSON.stringify({ error: `Python could not be started: ${error.message}` });
  }
  postMessage({ id, answer });
};
