"""What the documentation claims about performance, measured: `make bench`."""
