"""The tests of cpcompile."""
