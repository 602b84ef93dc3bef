// The OpenAI API over NATS from JavaScript: one answer, a stream, and a durable job.
//
//     npm install @nats-io/transport-node @nats-io/jetstream
//     node openai_over_nats.mjs nats://127.0.0.1:4222 demo "What is the capital of France?" [API key]

import { connect, createInbox, headers } from "@nats-io/transport-node";
import { jetstream } from "@nats-io/jetstream";

const [servers, model, question, key] = process.argv.slice(2);
const nc = await connect({ servers });

function chat(more = {}) {
  return JSON.stringify({ model, messages: [{ role: "user", content: question }], max_tokens: 64, ...more });
}

function ownHeaders(more = {}) {
  const made = headers();
  if (key) made.set("Authorization", `Bearer ${key}`);
  for (const [name, value] of Object.entries(more)) made.set(name, value);
  return made;
}

async function oneAnswer() {
  const reply = await nc.request("jw.openai.chat.completions", chat(), { timeout: 60_000, headers: ownHeaders() });
  const answer = reply.json();
  if (reply.headers?.get("Jw-Status") !== "200") throw new Error(answer.error.message);
  return answer.choices[0].message.content;
}

async function* aStream() {
  const inbox = createInbox();
  const events = nc.subscribe(inbox);
  nc.publish("jw.openai.chat.completions", chat({ stream: true }), { reply: inbox, headers: ownHeaders() });
  for await (const message of events) {
    if (message.data.length > 0) { // else the end marker, or a sign of life
      const event = message.json();
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) if (choice.delta.content) yield choice.delta.content;
    }
    if (message.headers?.has("Jw-End")) break; // the last message
  }
}

// Stored when `publish` returns: it is done even if no gateway and no worker runs at this moment.
async function aJob() {
  const subject = `jw.results-out.${createInbox().split(".").pop()}`;
  const results = nc.subscribe(subject, { max: 1 });
  const stored = await jetstream(nc).publish("jw.openai.jobs.chat.completions", chat(), {
    headers: ownHeaders({ "Jw-Result-Subject": subject }),
  });
  console.log(`(job ${stored.seq} is stored)`);
  for await (const result of results) return result.json().choices[0].message.content;
}

console.log("answer:", await oneAnswer());
process.stdout.write("stream: ");
for await (const text of aStream()) process.stdout.write(text);
console.log();
console.log("job:", await aJob());
await nc.close();
