"""Devices and processes: mesh, shardings, device memory and the cache of compiled programs."""
