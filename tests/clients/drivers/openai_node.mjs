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
  async fine_tune({ file }) {
    const method = { type: "dpo", dpo: { hyperparameters: { beta: 0.2, n_epochs: "auto" } } };
    const made = { model, training_file: file, suffix: "own", seed: 1, method, metadata: { a: "b" } };
    const job = await client.fineTuning.jobs.create(made);
    return { id: job.id, status: job.status, beta: job.method.dpo.hyperparameters.beta };
  },
  act: async ({ job, verb }) => (await client.fineTuning.jobs[verb](job)).status,
  async fine_tuned({ job }) {
    const { jobs } = client.fineTuning;
    const [done, steps, events, jobIds, modelIds] = [await jobs.retrieve(job), [], new Set(), [], []];
    const named = done.fine_tuned_model;
    for await (const each of jobs.checkpoints.list(job, { limit: 1 })) steps.push(each.step_number);
    for await (const each of jobs.listEvents(job, { limit: 2 })) events.add(each.id);
    for await (const each of jobs.list({ limit: 1 })) jobIds.push(each.id);
    for await (const each of client.models.list()) modelIds.push(each.id);
    const known = modelIds.includes(named) && (await client.models.retrieve(named)).id === named;
    const text = (await ask({ model: named })).choices[0].message.content;
    const { deleted } = await client.models.delete(named);
    const gone = (await thrownBy(() => ask({ model: named }))).message;
    const told = { model: named, steps, events: events.size, listed: jobIds.includes(job), known };
    return { ...told, status: done.status, text, deleted, gone };
  },
  streams: ({ count, until }) => Promise.all(Array.from({ length: count }, () => read(until))),
});
