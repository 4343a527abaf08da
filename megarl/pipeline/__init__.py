"""Pipeline schedules as data: generate, check, execute."""
