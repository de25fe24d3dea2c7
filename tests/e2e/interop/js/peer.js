// A js-libp2p peer that the tests drive over a Unix socket: `node peer.js DIRECTORY SECURITY`.
//
// It knows nothing of the tensor protocol: it dials, opens and accepts streams, and carries bytes between a
// stream and a socket. The control socket is DIRECTORY/control.sock; a request and its answer are one line of
// JSON each. Once a request for a stream is answered, the same connection is the stream. For inbound
// streams the peer connects to the socket that the test named, sends one line of JSON, then the bytes.
//
// An end of the stream is an end of the socket and the other way round. A request resets a stream. The peer
// listens on 127.0.0.1 alone and ends when its standard input does.

import './node20.js'
import net from 'node:net'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { identify } from '@libp2p/identify'
import { peerIdFromString } from '@libp2p/peer-id'
import { tcp } from '@libp2p/tcp'
import { tls } from '@libp2p/tls'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'

const MAX_LINE_BYTES = 64 * 1024
// Beyond this, reading waits for the other side: 16 MiB must not pile up here.
const MAX_UNREAD_BYTES = 16 * 1024 * 1024
const SECURITIES = { noise, tls }

const [directory, security] = process.argv.slice(2)
const host = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [SECURITIES[security]()],
  streamMuxers: [yamux()],
  services: { identify: identify() }
})

const carried = new Map() // by name: a stream, how many bytes of the socket are on it, who waits for more

const handlers = {
  identify: async () => ({
    peer: host.peerId.toString(),
    addresses: host.getMultiaddrs().map((address) => address.toString())
  }),
  connect: async ({ address }) => {
    await host.dial(multiaddr(address))
    return {}
  },
  peers: async () => ({ peers: host.getPeers().map((peer) => peer.toString()) }),
  disconnect: async ({ peer }) => {
    await host.hangUp(peerIdFromString(peer))
    return {}
  },
  handle: async ({ protocols, path }) => {
    for (const protocol of protocols) {
      await host.handle(protocol, (stream) => { accept(stream, path) })
    }
    return {}
  },
  reset: async ({ stream: name, after }) => {
    const item = carried.get(name)
    while (item.numBytes < after) {
      await new Promise((resolve) => { item.onMore = resolve })
    }
    item.stream.abort(new Error('as requested'))
    return {}
  }
}

function accept (stream, path) {
  const socket = net.connect({ path, allowHalfOpen: true })
  carry(stream, socket)
}

function carry (stream, socket) {
  stream.maxReadBufferLength = MAX_UNREAD_BYTES
  const name = String(carried.size)
  const item = { stream, numBytes: 0, onMore: () => {} }
  carried.set(name, item)
  socket.write(JSON.stringify({ protocol: stream.protocol, stream: name }) + '\n')
  const abort = (error) => {
    stream.abort(error)
    socket.destroy()
  }
  socket.on('error', abort)
  fromStream(stream, socket).catch(abort)
  fromSocket(socket, item).catch(abort)
}

async function fromStream (stream, socket) {
  // A stream tells its end once, also where nothing reads yet: on a slow machine we would wait for it for ever.
  if (stream.remoteWriteStatus === 'closed') {
    setImmediate(() => { stream.dispatchEvent(new Event('remoteCloseWrite')) })
  }
  for await (const chunk of stream) {
    const data = chunk instanceof Uint8Array ? chunk : chunk.subarray()
    if (!socket.write(data)) {
      await new Promise((resolve) => { socket.once('drain', resolve) })
    }
  }
  if (stream.status === 'reset' || stream.status === 'aborted') {
    throw new Error(`the stream was ${stream.status}`)
  }
  socket.end()
}

async function fromSocket (socket, item) {
  // Without the option, the end of what we read would also end what we write.
  for await (const data of socket.iterator({ destroyOnReturn: false })) {
    if (!item.stream.send(data)) {
      await item.stream.onDrain()
    }
    item.numBytes += data.length
    item.onMore()
  }
  await item.stream.close()
}

async function readLine (socket) {
  let received = Buffer.alloc(0)
  while (!received.includes(10)) {
    const data = await new Promise((resolve, reject) => {
      socket.once('data', resolve)
      socket.once('close', () => { resolve(null) })
      socket.once('error', reject)
    })
    if (data === null) return null
    received = Buffer.concat([received, data])
    if (received.length > MAX_LINE_BYTES) throw new Error('the request is too long')
  }
  socket.pause()
  const end = received.indexOf(10)
  if (received.length > end + 1) socket.unshift(received.subarray(end + 1))
  return JSON.parse(received.subarray(0, end).toString())
}

async function serve (socket) {
  socket.on('error', () => {})
  const request = await readLine(socket)
  if (request === null) return
  const answer = (content) => { socket.write(JSON.stringify(content) + '\n') }
  try {
    if (request.do === 'open') {
      carry(await host.dialProtocol(peerIdFromString(request.peer), request.protocols), socket)
    } else {
      answer(await handlers[request.do](request))
      socket.end()
    }
  } catch (error) {
    answer({ error: `${error.name}: ${error.message}` })
    socket.end()
  }
}

const control = net.createServer({ allowHalfOpen: true }, serve)
control.listen(`${directory}/control.sock`)
process.stdin.resume()
process.stdin.on('end', () => process.exit(0))
