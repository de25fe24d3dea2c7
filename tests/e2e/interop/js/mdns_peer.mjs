// A js-libp2p peer with multicast DNS: `node mdns_peer.mjs ADDRESS`, the IPv4 address to listen on.
//
// It prints one line of JSON for what it is and one for each peer that it discovers, and ends when its standard
// input does. Only for network namespaces: it announces itself to everybody.

import './node20.js'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { mdns } from '@libp2p/mdns'
import { tcp } from '@libp2p/tcp'
import { createLibp2p } from 'libp2p'

const say = (content) => { console.log(JSON.stringify(content)) }

const host = await createLibp2p({
  addresses: { listen: [`/ip4/${process.argv[2]}/tcp/0`] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  // Once is all that a test waits for: what a peer announces by itself must not be needed.
  peerDiscovery: [mdns({ interval: 2000 })],
  start: false
})
host.addEventListener('peer:discovery', ({ detail }) => {
  say({
    found: detail.id.toString(),
    addresses: detail.multiaddrs.map((address) => `${address.toString()}/p2p/${detail.id}`)
  })
})
await host.start()
say({
  peer: host.peerId.toString(),
  addresses: host.getMultiaddrs().map((address) => address.toString())
})
process.stdin.resume()
process.stdin.on('end', async () => {
  await host.stop()
  process.exit(0)
})
