"""What `POST /infer` takes and answers, without a connection: for the service and for Ray Serve."""
