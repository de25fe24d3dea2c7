"""Hosts, which listen and dial, over any network; identities, addresses and names of machines."""
