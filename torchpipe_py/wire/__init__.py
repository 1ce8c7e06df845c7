"""Requests and answers of `POST /infer`, without a connection, for the service and for Ray Serve."""
