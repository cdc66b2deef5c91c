"""DiskStore: a crash-safe store in a local directory."""
