"""CUDA tensors: from the GPU to page-locked memory, and from there to a file."""
