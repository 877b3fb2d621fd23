"""The HTTP server of a hub: routes, authentication, limits, metrics."""
