"""CPU tensors: from memory to a file, and a pool of pages that they come from."""
