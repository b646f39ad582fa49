// Anthropic's JavaScript client.
import Anthropic from "@anthropic-ai/sdk";
import { ASKED, HURRY_MS, PARAMETERS, refusal, serve, thrownBy } from "./serve.mjs";

const [url, model] = process.argv.slice(2);
const client = new Anthropic({ baseURL: url, apiKey: "none" });
const asked = { model, messages: ASKED, max_tokens: 12 };
const tools = [{ name: "add", description: "Adds.", input_schema: PARAMETERS }];
const ask = (but, options) => client.messages.create({ ...asked, ...but }, options);

function call(reply) {
  const called = reply.content.find((block) => block.type === "tool_use");
  return { id: reply.id, name: called.name, arguments: JSON.stringify(called.input) };
}

async function read(until) {
  let id;
  for await (const event of await ask({ stream: true })) {
    id ??= event.message?.id;
    if (until === "middle" && event.type === "content_block_delta") break;
  }
  return id;
}

await serve({
  async whole() {
    const reply = await ask();
    return { id: reply.id, text: reply.content[0].text };
  },
  async streamed() {
    const reply = await client.messages.stream(asked).finalMessage();
    return { id: reply.id, text: reply.content[0].text };
  },
  called: async () => call(await ask({ tools })),
  called_in_stream: async () => call(await client.messages.stream({ ...asked, tools }).finalMessage()),
  async unknown_model() {
    const error = await thrownBy(() => ask({ model: "nope" }));
    return refusal(error, error.constructor.name, error.requestID);
  },
  async hurried() {
    const error = await thrownBy(() => ask({}, { timeout: HURRY_MS, maxRetries: 0 }));
    return refusal(error, error.constructor.name);
  },
  streams: ({ count, until }) => Promise.all(Array.from({ length: count }, () => read(until))),
});
