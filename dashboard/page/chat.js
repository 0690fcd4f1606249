/* A chat with the model, over /v1/chat/completions. The conversation and the API key exist only in this page's memory. */
import { make, ms, number, say } from "./text.js";

const place = (id) => document.getElementById(id);
const panel = place("chat"), form = panel.querySelector("form"), log = place("messages"), prompt = place("prompt");
let messages = [], running = null;

/* `model()` returns the model's name; `showRequest(id)` shows the row of a request. */
export function startChat(model, showRequest) {
  place("chat-open").addEventListener("click", () => {
    panel.hidden = !panel.hidden;
    place("chat-open").setAttribute("aria-expanded", String(!panel.hidden));
    if (!panel.hidden) prompt.focus();
  });
  prompt.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit(place("send"));
  });
  place("stop").addEventListener("click", () => running?.abort());
  place("clear").addEventListener("click", () => {
    running?.abort();
    log.replaceChildren(...(messages = []));
    prompt.focus();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!running) send(model(), showRequest);
  });
}

async function send(model, showRequest) {
  const conversation = messages, said = { role: "user", content: prompt.value }, answer = { role: "assistant", content: "" };
  const thoughts = make("p", { class: "note" }), text = make("p"), note = make("p", { class: "note" }, "generating");
  const block = make("div", { class: "answer", "aria-busy": "true" }, thoughts, text, note); // read aloud when it is complete
  log.append(make("p", { class: "said" }, said.content), block);
  running = new AbortController();
  place("send").disabled = !(place("stop").disabled = false);
  prompt.value = "";
  const began = performance.now();
  let id = null, first = null, usage = null, how = "", reasoning = "";
  try {
    const body = { model, messages: [...messages, said], stream: true, stream_options: { include_usage: true },
      max_tokens: Number(place("max-tokens").value) };
    for await (const chunk of chunks(body, running.signal)) {
      if (chunk.error) throw new Error(chunk.error.message);
      id = chunk.id;
      const { delta, finish_reason } = chunk.choices?.[0] ?? {};
      if (delta?.content || delta?.reasoning_content) first ??= performance.now();
      answer.content += delta?.content ?? "";
      reasoning += delta?.reasoning_content ?? "";
      how = finish_reason ?? how;
      usage = chunk.usage ?? usage;
      keepAtEnd(() => { say(thoughts, reasoning); say(text, answer.content); });
    }
    if (!usage) throw new Error("The stream ended early.");
    say(note, `${number(usage.completion_tokens)} tokens (${how}) in ${ms(performance.now() - began)} ms, first text after `
      + `${first === null ? "–" : ms(first - began)} ms. `);
  } catch (error) {
    const isStopped = running.signal.aborted;
    say(note, isStopped ? "Stopped. " : error instanceof TypeError ? "The connection to the router failed. " : `${error.message} `);
    note.classList.toggle("bad", !isStopped);
  }
  if (conversation === messages && answer.content) messages = [...messages, said, answer];
  if (!answer.content) text.remove();
  if (!reasoning) thoughts.remove();
  if (id) {
    const link = make("button", { type: "button", class: "link" }, id);
    link.addEventListener("click", () => showRequest(id));
    keepAtEnd(() => note.append("Request ", link));
  }
  block.setAttribute("aria-busy", "false");
  running = null;
  place("send").disabled = !(place("stop").disabled = true);
}

function keepAtEnd(change) {
  const isAtEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
  change();
  if (isAtEnd) log.scrollTop = log.scrollHeight;
}

/* Yields the chunks of a streamed completion. An error status becomes an Error with the router's message. */
async function* chunks(body, signal) {
  const headers = { "content-type": "application/json" }, key = place("key").value.trim();
  if (key) headers.authorization = `Bearer ${key}`;
  const answer = await fetch("v1/chat/completions", { method: "POST", headers, body: JSON.stringify(body), signal });
  if (!answer.ok) {
    const { error } = await answer.json().catch(() => ({})), wait = answer.headers.get("retry-after");
    throw new Error(`${answer.status}: ${error?.message ?? answer.statusText}${wait ? ` Try again in ${wait} s.` : ""}`);
  }
  let rest = "";
  for await (const piece of textOf(answer.body)) {
    const lines = (rest + piece).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice(6));
    }
  }
}

async function* textOf(stream) { // Safari cannot iterate over a stream
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  for (let part = await reader.read(); !part.done; part = await reader.read()) yield part.value;
}
