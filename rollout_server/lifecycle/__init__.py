"""A group's life: admission, open, finish, expire, takeover; the server's heartbeat and drain."""
