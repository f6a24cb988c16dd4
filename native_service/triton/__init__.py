"""tritonserver: where it comes from, its process, and the processes of its models."""
