// Use the AI SDK with its provider for OpenAI-compatible servers.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const provider = createOpenAICompatible({ name: "baton", baseURL: `${process.env.BATON_CLIENTS_URL}/v1`, includeUsage: true });
const withTools = createOpenAICompatible({ name: "baton", baseURL: `${process.env.BATON_CLIENTS_TOOLS_URL}/v1` });
const settings = { model: provider(process.env.BATON_CLIENTS_MODEL), prompt: "Tell me a story", maxOutputTokens: 8, maxRetries: 0 };

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

await works("generateText", async () => (await generateText(settings)).text);
await works("streamText with usage", async () => {
  const result = streamText(settings);
  let text = "";
  for await (const part of result.textStream) text += part;
  return text && (await result.usage).outputTokens;
});
const weather = tool({
  description: "Get the weather in a location",
  inputSchema: jsonSchema({ type: "object", properties: { location: { type: "string" } }, required: ["location"] }),
  execute: async ({ location }) => `${location}: 14 degrees`,
});
const steps = { model: withTools("tools"), tools: { weather }, stopWhen: stepCountIs(5), prompt: "What is the weather in Paris?" };
await works("generateText with tools", async () => (await generateText(steps)).text.includes("Paris: 14 degrees"));
await works("streamText with tools", async () => {
  let text = "";
  for await (const part of streamText(steps).textStream) text += part;
  return text.includes("Paris: 14 degrees");
});
const schema = jsonSchema({ type: "object", properties: { n: { type: "integer", minimum: 0, maximum: 9 } }, required: ["n"], additionalProperties: false });
const strict = createOpenAICompatible({ name: "baton", baseURL: `${process.env.BATON_CLIENTS_URL}/v1`, supportsStructuredOutputs: true });
await works("generateObject", async () => {
  const { object } = await generateObject({ ...settings, model: strict(process.env.BATON_CLIENTS_MODEL), maxOutputTokens: 200, schema });
  return Number.isInteger(object.n);
});
