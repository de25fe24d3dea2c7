// What the clients of OpenAI and Ollama for JavaScript get from a server. What to ask is a line of JSON on stdin:
// url, model, prompts, max_tokens, and a logit_bias by which answers in JSON come to an end. With `waits`: a stream
// alone, after another line, with a line for each piece.

import { createInterface } from 'node:readline'
import { Ollama } from 'ollama'
import OpenAI from 'openai'

const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]()
const { url, model, prompts, max_tokens, bias, waits } = JSON.parse((await lines.next()).value)
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: 'none needed', maxRetries: 0 })
const ollama = new Ollama({ host: url })
const messages = [{ role: 'user', content: prompts[0] }]
const answers = { model, temperature: 0, max_tokens }

async function streamed (report) {
  let text = ''
  for await (const event of await openai.chat.completions.create({ ...answers, messages, stream: true })) {
    text += event.choices[0]?.delta?.content ?? ''
    report()
  }
  return text
}

if (waits) {
  console.log('ready')
  await lines.next()
  const stream = await streamed(() => console.log('piece'))
  console.log(JSON.stringify({ stream }))
  process.exit(0)
}

const tools = [{
  type: 'function',
  function: {
    name: 'get_weather',
    parameters: {
      type: 'object',
      properties: { is_now: { type: 'boolean' } },
      required: ['is_now'],
      additionalProperties: false
    }
  }
}]
const called = await openai.chat.completions.create({
  ...answers,
  messages,
  max_tokens: 64,
  tools,
  tool_choice: { type: 'function', function: { name: 'get_weather' } },
  logit_bias: bias
})
const call = called.choices[0].message.tool_calls[0].function
const whole = await openai.chat.completions.create({ ...answers, messages })
const text = await openai.completions.create({ ...answers, prompt: prompts[0] })
const embedded = await openai.embeddings.create({ model, input: prompts })

const options = { temperature: 0, num_predict: max_tokens }
const chat = await ollama.chat({ model, messages, options })
let chatStream = ''
for await (const part of await ollama.chat({ model, messages, options, stream: true })) {
  chatStream += part.message.content
}
const generated = await ollama.generate({ model, prompt: prompts[0], raw: true, options })
const listed = await ollama.list()
const vectors = await ollama.embed({ model, input: prompts })
let refused
try {
  await ollama.chat({ model: 'other', messages })
} catch (error) {
  refused = error.status_code
}

console.log(JSON.stringify({
  openai: {
    chat: whole.choices[0].message.content,
    stream: await streamed(() => {}),
    usage: whole.usage.completion_tokens,
    call: { name: call.name, args: JSON.parse(call.arguments) },
    text: text.choices[0].text,
    dimensions: embedded.data.map(each => each.embedding.length)
  },
  ollama: {
    chat: chat.message.content,
    stream: chatStream,
    usage: chat.eval_count,
    generate: generated.response,
    models: listed.models.map(each => each.model),
    dimensions: vectors.embeddings.map(each => each.length),
    refused
  }
}))
