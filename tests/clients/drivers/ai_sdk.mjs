// Vercel's AI SDK, by the provider that the third argument names.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, streamText, tool } from "ai";
import { HURRY_MS, PARAMETERS, PROMPT, refusal, serve, thrownBy } from "./serve.mjs";

const [url, model, way] = process.argv.slice(2);
const of = { name: "tuneloop", baseURL: `${url}/v1`, apiKey: "none" };
const provider = way === "responses" ? createOpenAI(of) : createOpenAICompatible(of);
const asked = { model: provider(model), prompt: PROMPT, maxOutputTokens: 99 };
const tools = { add: tool({ description: "Adds.", inputSchema: jsonSchema(PARAMETERS) }) };
const quiet = { onError() {} };

async function call(reply) {
  const [called] = await reply.toolCalls;
  if (called.invalid) throw called.error;
  return { id: (await reply.response).id, name: called.toolName, arguments: JSON.stringify(called.input) };
}

async function read(until) {
  const leaving = new AbortController();
  let id;
  const stream = streamText({ ...asked, ...quiet, abortSignal: leaving.signal, includeRawChunks: true });
  for await (const part of stream.fullStream) {
    if (part.type === "raw") id ??= part.rawValue.response?.id ?? part.rawValue.id;
    if (until === "middle" && part.type === "text-delta") leaving.abort();
  }
  return id;
}

await serve({
  async whole() {
    const reply = await generateText(asked);
    return { id: reply.response.id, text: reply.text };
  },
  async streamed() {
    const stream = streamText(asked);
    return { id: (await stream.response).id, text: await stream.text };
  },
  called: async () => call(await generateText({ ...asked, tools })),
  called_in_stream: async () => call(streamText({ ...asked, tools })),
  async unknown_model() {
    const error = await thrownBy(() => generateText({ ...asked, model: provider("nope") }));
    return refusal(error, `${error.name} ${error.statusCode}`, error.responseHeaders["x-request-id"]);
  },
  async hurried() {
    const abortSignal = AbortSignal.timeout(HURRY_MS);
    return refusal({}, (await thrownBy(() => generateText({ ...asked, maxRetries: 0, abortSignal }))).name);
  },
  streams: ({ count, until }) => Promise.all(Array.from({ length: count }, () => read(until))),
});
