"""API of llama.cpp's server for editors, in front of the same coordinator: `/infill`."""
