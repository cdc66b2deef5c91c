"""RemoteStore and its back ends: Redis, object storage (S3, Google Cloud, Azure) and Mooncake."""
