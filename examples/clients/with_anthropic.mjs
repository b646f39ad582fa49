// Anthropic's JavaScript client. It sends unknown fields of `metadata`, too.
import Anthropic from "@anthropic-ai/sdk";

const tuneloop = process.env.TUNELOOP_URL ?? "http://localhost:8010";
const model = process.env.TUNELOOP_MODEL ?? "tiny";

const client = new Anthropic({ baseURL: tuneloop, apiKey: "none" });
const reply = await client.messages.create({
  model,
  max_tokens: 12,
  messages: [{ role: "user", content: "3+4=" }],
  metadata: { user_id: "ann", task_id: "task-1", run_id: "0" },
});
console.log(reply.id, reply.content[0].text);

const feedback = { msg_ids: [reply.id], reward: 1.0 };
console.log(JSON.stringify(await client.post("/feedback", { body: feedback })));
