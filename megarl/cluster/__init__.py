"""Who am I: device, partition, parallel groups, control store."""
