// openai-node.
import OpenAI from "openai";
import { ASKED, HURRY_MS, PARAMETERS, refusal, serve, thrownBy } from "./serve.mjs";

const [url, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none" });
const asked = { model, messages: ASKED, max_tokens: 12 };
const tools = [{ type: "function", function: { name: "add", description: "Adds.", parameters: PARAMETERS } }];
const ask = (but, options) => client.chat.completions.create({ ...asked, ...but }, options);

function call(reply) {
  const [{ function: called }] = reply.choices[0].message.tool_calls;
  return { id: reply.id, name: called.name, arguments: called.arguments };
}

async function read(until) {
  let id;
  for await (const piece of await ask({ stream: true })) {
    id = piece.id;
    const [choice] = piece.choices;
    if ((until === "middle" && choice.delta.content) || (until === "finish" && choice.finish_reason)) break;
  }
  return id;
}

await serve({
  async whole() {
    const reply = await ask();
    return { id: reply.id, text: reply.choices[0].message.content };
  },
  async streamed() {
    let [id, text] = ["", ""];
    for await (const piece of await ask({ stream: true })) {
      id = piece.id;
      text += piece.choices[0].delta.content ?? "";
    }
    return { id, text };
  },
  called: async () => call(await ask({ tools })),
  called_in_stream: async () => call(await client.chat.completions.stream({ ...asked, tools }).finalChatCompletion()),
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
