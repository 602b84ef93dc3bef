// What the official client makes of the gateway: `node openai_client.mjs URL MODEL CASE` prints one JSON object.
import OpenAI from "openai";

const [url, model, wanted] = process.argv.slice(2);
const client = new OpenAI({ baseURL: url, apiKey: "none", maxRetries: 0 });
const messages = [{ role: "user", content: "What is the weather in Paris?" }];
const parameters = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };

async function failure(attempt) {
  try {
    await attempt();
  } catch (error) {
    return { kind: error.constructor.name, ours: error instanceof OpenAI.APIError, status: error.status, code: error.code, param: error.param, text: error.message };
  }
  throw new Error("no failure");
}

async function readAll(stream) {
  let text = "";
  for await (const chunk of stream) text += chunk.choices[0]?.delta?.content ?? "";
  return text;
}

const cases = {
  async chat() {
    const { data, response } = await client.chat.completions.create({ model, messages }).withResponse();
    return { text: data.choices[0].message.content, finish: data.choices[0].finish_reason, usage: data.usage, id: response.headers.get("x-jetwake-request-id") };
  },
  async stream() {
    let text = "", usage = null, ends = [];
    for await (const chunk of await client.chat.completions.create({ model, messages, stream: true, stream_options: { include_usage: true } })) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
      if (chunk.choices[0]?.finish_reason) ends.push(chunk.choices[0].finish_reason);
    }
    return { text, usage, ends };
  },
  async waiting() {
    const stream = await client.chat.completions.create({ model, messages, stream: true });  // it has begun by now, and pauses
    await new Promise((resolve) => setTimeout(resolve, 500));
    await client.chat.completions.create({ model, messages });  // so that it is seen from outside
    return { text: await readAll(stream) };
  },
  async helper() {
    const runner = client.chat.completions.stream({ model, messages });
    return { text: await runner.finalContent() };
  },
  async tools() {
    const asked = [];
    const weather = (given) => { asked.push(given); return "sunny"; };
    const tool = { type: "function", function: { name: "weather", description: "The weather.", parameters, parse: JSON.parse, function: weather } };
    const runner = client.chat.completions.runTools({ model, messages, tools: [tool], stream: true });
    const text = await runner.finalContent();
    return { text, asked, roles: runner.messages.map((message) => message.role) };
  },
  async legs() {
    const text = (await client.completions.create({ model, prompt: "one" })).choices[0].text;
    return { text, models: (await client.models.list()).data.map((one) => one.id), said: (await client.responses.create({ model, input: "one" })).output_text };
  },
  async events() {
    const kinds = [];
    let text = "";
    for await (const event of await client.responses.create({ model, input: "one", stream: true })) {
      kinds.push(event.type);
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    return { kinds, text };
  },
  async errors() {
    return {
      unknown: await failure(() => client.chat.completions.create({ model: "nope", messages })),
      wrong: await failure(() => client.chat.completions.create({ model, messages, temperature: -1, stream: true })),
    };
  },
  async broken() {
    return await failure(async () => readAll(await client.chat.completions.create({ model, messages, stream: true })));
  },
  async left() {
    const stream = await client.chat.completions.create({ model, messages, stream: true });
    for await (const chunk of stream) if (chunk.choices[0]?.delta?.content) break;
    return { id: stream.controller.signal.aborted };
  },
};

console.log(JSON.stringify(await cases[wanted]()));
