"""Tree operations: one public signature each, a plain PyTorch truth, and room for a fast twin beside it."""
