"""Settings of engines and of the devices that processes stand on."""
