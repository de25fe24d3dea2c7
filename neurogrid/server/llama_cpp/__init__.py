"""What editors ask of llama.cpp's server, in front of the same coordinator: `/infill`."""
