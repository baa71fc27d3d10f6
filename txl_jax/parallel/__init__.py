"""Devices and processes: mesh, shardings, memory of a device, compilation cache."""
