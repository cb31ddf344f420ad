"""The client SDK, against a gRPC server of the test where one is needed."""
