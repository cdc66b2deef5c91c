"""RemoteStore and its back ends: Redis, S3 and Mooncake."""
