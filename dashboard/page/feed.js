/* The router's event stream. It reports when it is disconnected, and reconnects, even if the router answers
   with an error or sends nothing. */

const SILENT_MS = 5000, RETRY_MS = 1500;
const KINDS = ["status", "steps", "requests"];

/* Calls `onEvent(kind, data)` for every event, and `changed(state)` with "live" or "gone". */
export function listen(url, onEvent, changed) {
  let source = null, last = 0;
  const open = () => {
    source?.close();
    last = Date.now();
    source = new EventSource(url);
    source.onopen = () => { last = Date.now(); };
    source.onerror = () => changed("gone");
    for (const kind of KINDS) {
      source.addEventListener(kind, (event) => {
        last = Date.now();
        changed("live");
        onEvent(kind, JSON.parse(event.data));
      });
    }
  };
  open();
  setInterval(() => {
    const silent = Date.now() - last;
    if (silent > SILENT_MS) changed("gone");
    if (silent > SILENT_MS || (source.readyState === EventSource.CLOSED && silent > RETRY_MS)) open();
  }, RETRY_MS);
}

/* Returns the JSON of a GET, or null if it fails. */
export async function get(path) {
  try {
    const answer = await fetch(path);
    return answer.ok ? await answer.json() : null;
  } catch {
    return null;
  }
}
