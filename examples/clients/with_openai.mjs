// openai-node.
import OpenAI from "openai";

const tuneloop = process.env.TUNELOOP_URL ?? "http://localhost:8010";
const model = process.env.TUNELOOP_MODEL ?? "tiny";

const client = new OpenAI({ baseURL: `${tuneloop}/v1`, apiKey: "none" });
const reply = await client.chat.completions.create({
  model,
  messages: [{ role: "user", content: "3+4=" }],
  max_tokens: 12,
  metadata: { task_id: "task-1", run_id: "0" },
});
console.log(reply.id, reply.choices[0].message.content);

const feedback = { msg_ids: [reply.id], reward: 1.0 };
console.log(JSON.stringify(await client.post(`${tuneloop}/feedback`, { body: feedback })));
