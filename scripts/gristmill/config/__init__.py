"""The typed configuration: `schema` says what may stand in a config file, `load` reads and checks it."""
