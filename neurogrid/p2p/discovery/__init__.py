"""Finding peers: by multicast DNS on a local network, by Kademlia beyond it."""
