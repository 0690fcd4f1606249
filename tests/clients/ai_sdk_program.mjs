// Use the AI SDK with its provider for servers that are like OpenAI's.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, streamText } from "ai";

const provider = createOpenAICompatible({ name: "baton", baseURL: `${process.env.BATON_CLIENTS_URL}/v1`, includeUsage: true });
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
