"""LMS inside other people's training loops: a callback for each. They import the library that they are for."""
