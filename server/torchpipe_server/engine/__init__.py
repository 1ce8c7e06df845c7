"""An engine process: the shared nodes of a configuration, for all workers of a device."""
