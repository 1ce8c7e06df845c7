"""gRPC: messages, the methods of the Open Inference Protocol, and their answers, for the service and for Ray."""
