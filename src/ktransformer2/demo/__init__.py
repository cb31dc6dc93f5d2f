"""The demo: a real contract is read, asked twice, and forgotten, and the memory it took is shown."""
