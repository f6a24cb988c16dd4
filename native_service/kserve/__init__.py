"""KServe v2, where Triton cannot answer by itself."""
