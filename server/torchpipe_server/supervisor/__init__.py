"""The supervisor: owns sockets, ports and children; imports no torch."""
