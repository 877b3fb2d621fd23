"""Topics of an MQTT broker as sources and sinks."""
