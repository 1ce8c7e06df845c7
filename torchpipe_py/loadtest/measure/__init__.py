"""What a run did: of the server, of the machine, of the load tester itself."""
