// Use openai-node. Prints one line for each check, as checks.py does.
import OpenAI from "openai";

const model = process.env.BATON_CLIENTS_MODEL;
const client = new OpenAI({ baseURL: `${process.env.BATON_CLIENTS_URL}/v1`, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "Tell me a story" }];
const chat = (fields = {}) => client.chat.completions.create({ model, messages, max_tokens: 8, ...fields });

async function works(name, run) {
  try {
    const result = await run();
    console.log(result ? `ok ${name}` : `FAILED ${name}: ${result}`);
    process.exitCode ||= result ? 0 : 1;
  } catch (error) {
    console.log(`FAILED ${name}: ${error}`);
    process.exitCode = 1;
  }
}

await works("models", async () => (await client.models.list()).data[0].id === model);
await works("chat", async () => (await chat()).choices[0].message.content);
await works("stream", async () => {
  let text = "";
  for await (const chunk of await chat({ stream: true })) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
});
await works("stream helper", async () =>
  (await client.chat.completions.stream({ model, messages, max_tokens: 8 }).finalChatCompletion()).choices.length);
await works("abort", async () => {
  const stream = await chat({ stream: true, max_tokens: 500 });
  for await (const _ of stream) break;
  return stream.controller.signal.aborted;
});
await works("n=2", async () => (await chat({ n: 2 })).choices.length === 2);
await works("tools by runTools", async () => {
  const tools = new OpenAI({ baseURL: `${process.env.BATON_CLIENTS_TOOLS_URL}/v1`, apiKey: "none", maxRetries: 0 });
  const getWeather = {
    type: "function",
    function: {
      name: "getWeather",
      function: ({ location }) => `${location}: 14 degrees`,
      parse: JSON.parse,
      parameters: { type: "object", properties: { location: { type: "string" } } },
    },
  };
  const runner = tools.chat.completions.runTools({ model: "tools", messages, tools: [getWeather] });
  return (await runner.finalContent()).includes("Paris: 14 degrees");
});
await works("responses", async () => (await client.responses.create({ model, input: "x", max_output_tokens: 8 })).output_text);
