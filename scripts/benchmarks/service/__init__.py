"""The service over Thrift, against the same work in bare threads and behind mosec."""
