// Does what a test asks of a client package: a line of JSON in, `{"do": ..., ...}`, a line of JSON out.
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

export const PROMPT = "3+4=";
export const ASKED = [{ role: "user", content: PROMPT }];
export const PARAMETERS = {
  type: "object",
  properties: { a: { type: "integer" }, b: { type: "integer" } },
  required: ["a", "b"],
};
export const HURRY_MS = 1000;

/** An exception of a client's, as a test looks at it. */
export const refusal = (error, kind, requestId) => ({ kind, message: error.message, request_id: requestId });

/** The exception that a call must end with. */
export async function thrownBy(call) {
  try {
    await call();
  } catch (error) {
    return error;
  }
  throw new Error("nothing was thrown");
}

async function example({ path }) {
  const said = [];
  const log = console.log;
  console.log = (...words) => said.push(words.join(" "));
  try {
    await import(pathToFileURL(path));
  } finally {
    console.log = log;
  }
  return said.join("\n");
}

/** Answer until nobody asks any more. */
export async function serve(client) {
  for await (const line of createInterface({ input: process.stdin })) {
    const asked = JSON.parse(line);
    let told;
    try {
      told = { told: await (asked.do === "example" ? example(asked) : client[asked.do](asked)) };
    } catch (error) {
      told = { failed: error.stack };
    }
    process.stdout.write(`${JSON.stringify(told)}\n`);
  }
}
