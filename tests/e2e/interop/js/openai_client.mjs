// What OpenAI's own client for JavaScript gets from a server: openai_client.mjs URL MODEL PROMPT

import OpenAI from 'openai'

const [baseURL, model, prompt] = process.argv.slice(2)
const client = new OpenAI({ baseURL, apiKey: 'none needed', maxRetries: 0 })
const request = {
  model, messages: [{ role: 'user', content: prompt }], temperature: 0, max_completion_tokens: 12
}

const models = []
for await (const one of client.models.list()) models.push(one.id)

const whole = await client.chat.completions.create(request)

let streamed = ''
for await (const event of await client.chat.completions.create({ ...request, stream: true })) {
  streamed += event.choices[0]?.delta?.content ?? ''
}

const response = await client.responses.create({
  model, input: prompt, temperature: 0, max_output_tokens: 12
})
const embedded = await client.embeddings.create({ model, input: prompt })

let refused
try {
  await client.chat.completions.create({ ...request, temperature: 9 })
} catch (error) {
  refused = { status: error.status, param: error.param }
}

console.log(JSON.stringify({
  models,
  whole: whole.choices[0].message.content,
  streamed,
  usage: whole.usage.completion_tokens,
  response: response.output_text,
  dimensions: embedded.data[0].embedding.length,
  refused
}))
