/* Runs the simulator in a worker. The parts of Pyodide and the Python code are in the page, compressed. */
"use strict";
globalThis.batonSimulate = (() => {
  let asked = 0, worker = null;
  const open = new Map();

  async function unpacked(name) {
    const packed = Uint8Array.from(atob(document.getElementById(`part-${name}`).textContent), (each) => each.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).arrayBuffer();
  }

  async function start() {
    const names = ["loader", "module", "wasm", "library", "lock", "code"];
    const parts = Object.fromEntries(await Promise.all(names.map(async (name) => [name, await unpacked(name)])));
    const made = new Worker(URL.createObjectURL(new Blob([await unpacked("worker")], { type: "text/javascript" })));
    made.onmessage = ({ data: { id, answer } }) => {
      const { done, fail } = open.get(id), found = JSON.parse(answer);
      open.delete(id);
      if (found.error) fail(new Error(found.error));
      else done(found);
    };
    made.onerror = (event) => {
      for (const { fail } of open.values()) fail(new Error(event.message || "the worker has failed"));
      open.clear();
    };
    made.postMessage({ parts });
    return made;
  }

  return async (settings) => {
    await new Promise((done) => document.readyState === "loading" ? addEventListener("DOMContentLoaded", done) : done());
    worker ??= start();
    const made = await worker, id = ++asked;
    return new Promise((done, fail) => {
      open.set(id, { done, fail });
      made.postMessage({ id, query: JSON.stringify(settings) });
    });
  };
})();
