"""The tensor protocol by name, over both of its versions: on top of an exchange, which knows neither."""
