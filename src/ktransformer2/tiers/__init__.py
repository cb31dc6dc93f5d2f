"""Other places for blocks than the device: what they promise (`tier`), and one file a place."""
