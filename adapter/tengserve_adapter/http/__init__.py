"""The HTTP edge: routes, body limits, error replies, event streams, disconnects. It knows no dialect's field names."""
