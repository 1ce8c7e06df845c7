"""Parts of the demo and the examples: pictures, networks, and a client."""
