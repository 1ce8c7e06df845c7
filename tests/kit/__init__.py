"""What the tests of every folder share: waits, backends that tests steer, services, clients and a scripted server."""
