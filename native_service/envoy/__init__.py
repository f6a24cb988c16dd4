"""Envoy in front: where it comes from, its configuration, its process."""
