"""Processes beside Triton: the supervisor, the native gRPC service, health and metrics."""
