"""What every network behind `Host` must do, run over each of them: `-k memory` or `-k libp2p`."""
