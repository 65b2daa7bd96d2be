"""The doors (REST, gRPC) and the data plane behind both."""
