// A js-libp2p peer that serves a Kademlia DHT, driven over its standard input and output: `node dht_peer.mjs`.
//
// Each line of input is a request in JSON, each line of output its answer, in order; the first line of output says who
// and where the peer is. It listens on 127.0.0.1 alone, knows no bootstrap peer, and ends with its standard input.

import './node20.js'
import readline from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { CID } from 'multiformats/cid'

const host = await createLibp2p({
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  services: {
    identify: identify(),
    ping: ping(),
    dht: kadDHT({ protocol: '/ipfs/kad/1.0.0', clientMode: false, peerInfoMapper: passthroughMapper })
  }
})

const handlers = {
  connect: async ({ address }) => {
    await host.dial(multiaddr(address))
    return {}
  },
  provide: async ({ cid }) => {
    let told = 0
    for await (const event of host.services.dht.provide(CID.parse(cid), { signal: AbortSignal.timeout(30_000) })) {
      if (event.name === 'PEER_RESPONSE' && event.messageName === 'ADD_PROVIDER') told++
    }
    return { told }
  },
  find: async ({ cid }) => {
    const found = {}
    for await (const event of host.services.dht.findProviders(CID.parse(cid), { signal: AbortSignal.timeout(30_000) })) {
      for (const provider of event.providers ?? []) {
        found[provider.id.toString()] = provider.multiaddrs.map((address) => address.toString())
      }
    }
    return { found }
  }
}

const say = (answer) => process.stdout.write(JSON.stringify(answer) + '\n')
say({ peer: host.peerId.toString(), address: host.getMultiaddrs()[0].toString() })
for await (const line of readline.createInterface({ input: process.stdin })) {
  const request = JSON.parse(line)
  try {
    say(await handlers[request.do](request))
  } catch (error) {
    say({ error: String(error) })
  }
}
await host.stop()
process.exit(0)
