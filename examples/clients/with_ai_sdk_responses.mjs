// Vercel's AI SDK, by its provider for OpenAI: responses.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText } from "ai";

const tuneloop = process.env.TUNELOOP_URL ?? "http://localhost:8010";
const model = process.env.TUNELOOP_MODEL ?? "tiny";

const provider = createOpenAI({ baseURL: `${tuneloop}/v1`, apiKey: "none" });
const reply = await generateText({
  model: provider(model),
  prompt: "3+4=",
  maxOutputTokens: 12,
  providerOptions: { openai: { metadata: { task_id: "task-1", run_id: "0" } } },
});
console.log(reply.response.id, reply.text);

const feedback = { msg_ids: [reply.response.id], reward: 1.0 };
const answer = await fetch(`${tuneloop}/feedback`, { method: "POST", body: JSON.stringify(feedback) });
console.log(await answer.text());
