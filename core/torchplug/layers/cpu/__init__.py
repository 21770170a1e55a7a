"""Kernels for CPU in C, compiled on first use; where that cannot be, layers compute with torch."""
