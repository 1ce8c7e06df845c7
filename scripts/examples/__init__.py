"""What the demo and the examples are made of: pictures, networks, and a client."""
