"""Offline tools: readers of every bundle kind, signature checks and the Triton repository writer."""
